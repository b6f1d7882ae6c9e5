"""One snapshot of a table with the changes of one commit, made once: after a conflict the change must be planned again.

Imports ``pyiceberg``: to be imported when a table is opened.

Source: Iceberg's specification, "Snapshots"; Iceberg's documentation, "Table behavior properties".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata

_NAME_MAPPING = "schema.name-mapping.default"
_MERGE_MANIFESTS = "commit.manifest-merge.enabled"


class _SingleAttempt(Transaction):
    """A transaction that is not repeated after a conflict, and whose metadata is computed once for each update.

    The library copies the metadata, with all snapshots, whenever the metadata is looked at.
    """

    def __init__(self, table: Table) -> None:
        # Iceberg merges manifests by default, which the library does not: each commit would add a manifest for ever.
        properties = {_MERGE_MANIFESTS: "true", **table.properties, "commit.retry.num-retries": "0"}
        metadata = table.metadata.model_copy(update={"properties": properties})
        super().__init__(Table(table.name(), metadata, table.metadata_location, table.io, table.catalog, table.config))
        self._computed: tuple[int, TableMetadata] = (0, metadata)

    @property
    def table_metadata(self) -> TableMetadata:
        if self._computed[0] != len(self._updates):
            self._computed = (len(self._updates), super().table_metadata)
        return self._computed[1]


def commit_snapshot(
    table: Table,
    add: Sequence[IcebergFile],
    remove: Sequence[IcebergFile],
    properties: Mapping[str, str],
    summary: dict[str, str],
) -> tuple[Table, int]:
    """Commit a snapshot on top of the table's newest one, and properties of the table with it; also without files.

    Args:
        table: the table as it was read last.
        add: files whose rows become visible.
        remove: files whose rows vanish.
        properties: properties of the table to set.
        summary: text for people, by name.

    Returns:
        The table after it, and the snapshot's id.

    Raises:
        CommitFailedException: the table has another newest snapshot by now.
        CommitStateUnknownException: the catalog's answer was lost.
    """
    transaction = _SingleAttempt(table)
    update = transaction.update_snapshot(snapshot_properties=summary)
    producer: Any
    if remove:
        producer = update.overwrite()
        producer.delete_by_predicate(AlwaysTrue())  # in which manifests the files are looked for
        for file in remove:
            producer.delete_data_file(file)
    else:
        producer = update.merge_append()
    for file in add:
        producer.append_data_file(file)
    producer.commit()
    if table.name_mapping() is None:
        properties = {**properties, _NAME_MAPPING: table.schema().name_mapping.model_dump_json()}
    if properties:
        transaction.set_properties(dict(properties))
    return transaction.commit_transaction(), int(producer.snapshot_id)
