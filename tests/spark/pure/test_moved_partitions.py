"""Whole state partitions of other instances: the files, their later versions, and when partitions are moved as they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.spark.snapshots.moved_partitions import MOST_EMPTY_VERSIONS, are_moved_whole, moved_partitions
from dagster_checkpoints.spark.snapshots.query_files import is_state_of_version, needed_files
from dagster_checkpoints.state.errors import InstancesChanged
from dagster_checkpoints.state.fitted_checkpoint import KeyedStateShare
from dagster_checkpoints.state.key_groups import key_groups_of
from dagster_checkpoints.state.metadata import QuerySnapshot, StateFile, TaskSnapshot
from dagster_checkpoints.state.rescaled_instances import keyed_state_shares

GROUPS = 4


def query(batch_id: int, *state: str) -> QuerySnapshot:
    logs = ("metadata", f"offsets/{batch_id}", f"commits/{batch_id}", "state/0/_metadata/metadata")
    return QuerySnapshot(batch_id, tuple(StateFile(path, f"{path} of batch {batch_id}", 1) for path in (*logs, *state)))


def shares(*queries: QuerySnapshot | None, now: int, event_times: tuple[int, ...] = ()) -> dict[int, KeyedStateShare]:
    old = [TaskSnapshot(query=each, valve_watermark=(event_times or (0,) * 9)[i]) for i, each in enumerate(queries)]
    ran = {index: each for index, each in enumerate(queries) if each is not None}
    return keyed_state_shares(old, ran, now, GROUPS, "k", whole_partitions=True)


CHANGES = query(1, *(f"state/0/{partition}/left/{version}.changelog" for partition in (0, 1) for version in (1, 2)))
WHOLE = query(3, "state/0/0/left/4.zip", "state/0/0/left/SSTs/a.sst", "state/0/1/left/3.zip", "state/0/1/left/4.changelog")


def test_an_instance_none_of_whose_partitions_had_state_begins_a_new_query() -> None:
    """The instances that held these groups had ended, or had not run a batch: there are no state stores to continue."""
    assert {index: sorted(share.queries) for index, share in shares(CHANGES, None, now=4).items()} == {0: [0], 1: [0]}
    assert {index: sorted(share.queries) for index, share in shares(None, WHOLE, None, None, now=2).items()} == {0: [1]}


def test_partitions_of_queries_with_other_batches_get_one_version() -> None:
    """The query with the earliest event time goes on, as if it had run as many batches as the other one."""
    for first, second, event_times in ((CHANGES, WHOLE, (5, 9)), (WHOLE, CHANGES, (9, 5))):
        share = shares(first, second, now=1, event_times=event_times)[0]
        of_changes, of_whole = (0, 2) if first is CHANGES else (2, 0)
        moved = moved_partitions(share, share.queries[share.logs], "stage")
        assert (moved.partitions, moved.query.batch_id) == (4, 3)
        assert {(file.path, file.sha256) for file in moved.query.files} == {
            ("metadata", "metadata of batch 1"),
            ("offsets/3", "offsets/1 of batch 1"),
            ("commits/3", "commits/1 of batch 1"),
            ("state/0/_metadata/metadata", "state/0/_metadata/metadata of batch 1"),
            *(
                (f"state/0/{of_changes + p}/left/{v}.changelog", f"state/0/{p}/left/{v}.changelog of batch 1")
                for p in (0, 1)
                for v in (1, 2)
            ),
            (f"state/0/{of_whole}/left/4.zip", "state/0/0/left/4.zip of batch 3"),
            (f"state/0/{of_whole}/left/SSTs/a.sst", "state/0/0/left/SSTs/a.sst of batch 3"),
            (f"state/0/{of_whole + 1}/left/3.zip", "state/0/1/left/3.zip of batch 3"),
            (f"state/0/{of_whole + 1}/left/4.changelog", "state/0/1/left/4.changelog of batch 3"),
        }
        assert set(moved.empty_versions) == {f"state/0/{of_changes + p}/left/{v}.changelog" for p in (0, 1) for v in (3, 4)}


def test_whole_versions_of_an_earlier_batch_get_later_numbers() -> None:
    share = shares(query(1, "state/0/0/1.zip", "state/0/0/2.changelog"), query(6, "state/0/0/7.zip"), now=1)[0]
    moved = moved_partitions(share, share.queries[share.logs], "stage")
    state = {file.path: file.sha256 for file in moved.query.files if file.path.startswith("state/0/0/")}
    assert state == {
        "state/0/0/6.zip": "state/0/0/1.zip of batch 1",
        "state/0/0/7.changelog": "state/0/0/2.changelog of batch 1",
    }


def test_partitions_of_an_instance_that_has_run_no_batch_begin_empty() -> None:
    share = shares(query(1, "state/0/0/2.zip", "state/0/1/2.zip"), None, now=1)[0]
    moved = moved_partitions(share, share.queries[share.logs], "stage")
    assert set(moved.empty_versions) == {f"state/0/{partition}/{version}.changelog" for partition in (2, 3) for version in (1, 2)}
    assert are_moved_whole([moved])


def test_instances_that_are_divided_evenly_continue_their_own_queries() -> None:
    divided = shares(CHANGES, None, now=4, event_times=(9, 5))
    assert {index: (share.logs, share.groups) for index, share in divided.items()} == {0: (0, range(1)), 1: (0, range(1, 2))}
    moved = moved_partitions(divided[1], CHANGES, "stage")
    assert (moved.partitions, moved.query.batch_id, moved.empty_versions) == (1, 1, ())
    state = {file.path: file.sha256 for file in moved.query.files if file.path.startswith("state/0/0/")}
    assert state == {f"state/0/0/left/{v}.changelog": f"state/0/1/left/{v}.changelog of batch 1" for v in (1, 2)}


def test_very_many_versions_without_a_change_are_not_written() -> None:
    share = shares(CHANGES, query(MOST_EMPTY_VERSIONS, "state/0/0/left/9.zip"), now=1)[0]
    assert not are_moved_whole([moved_partitions(share, CHANGES, "stage")])


def test_state_that_is_not_in_rocksdb_is_refused() -> None:
    share = shares(query(1, "state/0/0/1.delta"), now=2)[0]
    with pytest.raises(InstancesChanged, match=r"stage: expected state in RocksDB.* found the file state/0/0/1\.delta"):
        moved_partitions(share, share.queries[0], "stage")


def test_the_log_of_a_query_that_has_run_one_batch_gets_the_batch_before_the_later_one() -> None:
    share = shares(query(0, "state/0/0/1.zip"), query(4, "state/0/0/5.zip"), now=1)[0]
    moved = moved_partitions(share, share.queries[0], "stage")
    logs = {file.path: file.sha256 for file in moved.query.files if file.path.startswith(("offsets/", "commits/"))}
    assert logs == {f"{log}/{batch}": f"{log}/0 of batch 0" for log in ("offsets", "commits") for batch in (3, 4)}


@given(st.data())
def test_each_partition_is_complete_and_is_moved_once(data: st.DataObject) -> None:
    """Whatever the versions of the old partitions, a restore finds all files of one version of each, and loses none."""
    before, now, each = (data.draw(st.integers(1, 4)) for _ in range(3))
    groups = before * now * each
    held = {old: key_groups_of(old, before, groups) for old in range(before)}
    queries = {}
    for old in range(before):
        version, paths = data.draw(st.integers(2, 6)), []
        for partition in range(groups // before):
            whole = data.draw(st.integers(0, version))
            paths += [f"state/0/{partition}/{whole}.zip"] if whole else []
            paths += [f"state/0/{partition}/{later}.changelog" for later in range(whole + 1, version + 1)]
        files = (f"{log}/{batch}" for log in ("offsets", "commits") for batch in (version - 2, version - 1))
        logs = ("metadata", "state/0/_metadata/metadata", *files)
        queries[old] = QuerySnapshot(version - 1, tuple(StateFile(path, f"{old} {path}", 1) for path in (*logs, *paths)))
    found: list[str] = []
    for index in range(now):
        own = key_groups_of(index, now, groups)
        parts = {old: query for old, query in queries.items() if set(own) & set(held[old])}
        share = KeyedStateShare(own, groups, "k", min(parts), parts, held, whole_partitions=True)
        moved = moved_partitions(share, parts[min(parts)], "stage")
        paths = [*(file.path for file in moved.query.files), *moved.empty_versions]
        assert len(paths) == len(set(paths))
        assert needed_files(paths, moved.query.batch_id, lambda _: set(), "stage") == sorted(paths)
        in_state = [file for file in moved.query.files if is_state_of_version(file.path)]
        assert {path.split("/")[2] for path in paths if is_state_of_version(path)} == set(map(str, range(len(own))))
        found += [file.sha256 for file in in_state]
    assert sorted(found) == sorted(f.sha256 for q in queries.values() for f in q.files if is_state_of_version(f.path))
