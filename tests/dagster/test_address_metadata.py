"""How metadata shows an address in storage."""

from __future__ import annotations

import dagster as dg
import pytest

from dagster_checkpoints import CheckpointCoordinatorResource
from dagster_checkpoints.plugin.event_metadata import address_metadata


def test_a_file_is_shown_as_a_path_which_a_browser_cannot_open_as_a_link() -> None:
    assert address_metadata("file:///a%20b/savepoint-1") == dg.MetadataValue.path("/a b/savepoint-1")
    assert address_metadata("/a b/savepoint-1") == dg.MetadataValue.path("/a b/savepoint-1")


@pytest.mark.parametrize("url", ["s3://bucket/savepoint-1", "file://other-host/savepoint-1"])
def test_what_is_elsewhere_is_shown_as_its_url(url: str) -> None:
    assert address_metadata(url) == dg.MetadataValue.url(url)


def test_the_editor_of_a_runs_configuration_shows_what_the_resource_is_and_not_its_whole_documentation() -> None:
    definition = CheckpointCoordinatorResource().get_resource_definition()
    expected = "Runs pipelines under consistent checkpoints, and holds their settings. In YAML None is `null`."
    assert definition.description == expected
    assert definition is not None and definition.config_schema.config_type.fields["interval"].description
