"""The meaning of URLs, locations and directory names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.errors import InvalidKey, InvalidRequest, InvalidStorageUrl
from dagster_checkpoints.files.urls import split_directory, validate_directory
from dagster_checkpoints.state.metadata import StateFile
from dagster_checkpoints.storage.layout import (
    Layout,
    SharedName,
    sha256_in,
    validate_request_id,
    validate_savepoint_name,
    validate_sha256,
)
from dagster_checkpoints.storage.locating import storage_of

LAYOUT = Layout("flights")
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,20}", fullmatch=True)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/a/b", "file:///a/b"),
        ("/a/b/", "file:///a/b"),
        ("/a/./b/../c", "file:///a/c"),
        ("/a b/50%", "file:///a%20b/50%25"),
        ("file:///a%20b", "file:///a%20b"),
        ("file:///a b", "file:///a%20b"),
        ("file://localhost/a", "file:///a"),
        ("/", "file:///"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket/a?b#c", "s3://bucket/a?b#c"),
        ("S3://Bucket/a", "s3://Bucket/a"),
        ("FILE:///a", "file:///a"),
    ],
)
def test_a_directory_has_one_url(given: str, url: str) -> None:
    assert validate_directory(given) == url == validate_directory(url)


@pytest.mark.parametrize(
    "url", ["", " ", "a", "./a", "~", "s3:", "s3://", "s3:///a", "s3://b/a//c", "s3://b/..", "gs://b", "file://h/a"]
)
def test_a_text_that_names_no_directory_is_refused(url: str) -> None:
    with pytest.raises(InvalidStorageUrl, match="expected a storage URL"):
        validate_directory(url)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("file:///a/b", ("file:///a", "b")),
        ("file:///a%20b/50%25", ("file:///a%20b", "50%")),
        ("file:///a", ("file:///", "a")),
        ("s3://bucket/a/b", ("s3://bucket/a", "b")),
        ("s3://bucket/a", ("s3://bucket", "a")),
        ("s3://bucket", ("s3://bucket", "")),
    ],
)
def test_whether_a_directory_is_inside_another(url: str, parts: tuple[str, str]) -> None:
    assert split_directory(url) == parts


@given(number=st.integers(0, 10**9), name=st.just("") | NAMES, token=st.from_regex("[0-9a-f]{6}", fullmatch=True))
def test_a_savepoints_directory_contains_its_id_and_name(number: int, name: str, token: str) -> None:
    assert LAYOUT.parse_savepoint(LAYOUT.savepoint(number, name, token)) == (number, name)


@pytest.mark.parametrize("folder", ["", "savepoint", "savepoint-", "savepoint-x", "chk-1-1", "my-savepoint-1-x", "savepoint-1x"])
def test_other_directories_are_not_savepoints(folder: str) -> None:
    assert LAYOUT.parse_savepoint(folder) is None


@given(request_id=NAMES)
def test_a_requests_files_are_distinguished(request_id: str) -> None:
    if request_id.endswith((".accepted", ".answer")):
        with pytest.raises(InvalidRequest):
            validate_request_id(request_id)
        return
    keys = {LAYOUT.request(request_id): "request", LAYOUT.accepted(request_id): "accepted", LAYOUT.answer(request_id): "answer"}
    assert len(keys) == 3
    for key, part in keys.items():
        assert LAYOUT.parse_request(key) == (request_id, part)


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "a\\b", "a\nb", "ü", "a" * 129])
def test_names_that_cannot_be_files_are_refused(name: str) -> None:
    for validate in (validate_request_id, validate_savepoint_name):
        with pytest.raises(InvalidRequest):
            validate(name)


def test_a_text_that_is_not_a_hash_names_no_state_file() -> None:
    assert sha256_in(f"flights/shared/{'a' * 64}") == "a" * 64
    assert sha256_in("flights/shared/readme.txt") == sha256_in(f"shared/{'A' * 64}") == ""
    for text in ("", "../" + "a" * 61, "a" * 63, "a" * 64 + "\n"):
        for refuse in (validate_sha256, LAYOUT.shared_file):
            with pytest.raises(InvalidKey):
                refuse(text)


@pytest.mark.parametrize("epoch", [0, 1, 42])
def test_a_state_files_name_in_metadata_is_its_name_in_storage(epoch: int) -> None:
    name = StateFile("offsets/4", "a" * 64, 1, epoch).name
    assert SharedName.parse(name) == ("a" * 64, epoch) and str(SharedName("a" * 64, epoch)) == name
    assert LAYOUT.shared_file(name) == f"flights/shared/{name}"


@pytest.mark.parametrize("ending", ["-", "-0", "-01", "-x", "-1-1", "--1", "-1\n", ".parquet"])
def test_other_names_are_not_shared_files(ending: str) -> None:
    assert SharedName.parse("a" * 64 + ending) is None
    with pytest.raises(InvalidKey, match="<sha256>-<epoch>"):
        LAYOUT.shared_file("a" * 64 + ending)


@pytest.mark.parametrize("root", ["s3://bucket", "s3://bucket/a b/c", "file:///a", "/a", "/a/my dir"])
@pytest.mark.parametrize("place", ["checkpoints/chk-4-1", "savepoints/savepoint-4-x", "savepoints/copy"])
@pytest.mark.parametrize("end", ["", "/", "/_metadata"])
def test_the_storage_of_a_location_in_a_pipelines_directory(root: str, place: str, end: str) -> None:
    assert storage_of(f"{root}/flights/{place}{end}") == (root, "flights")


@pytest.mark.parametrize(
    ("location", "root"),
    [
        ("s3://bucket/savepoints/savepoint-4-x", "s3://bucket/savepoints"),
        ("file:///archive/savepoints/savepoint-4-x", "file:///archive/savepoints"),
        ("/archive/savepoints/savepoint-4-x", "/archive/savepoints"),
        ("/data/my archive/savepoints/savepoint-4-x", "/data/my archive/savepoints"),
        ("file:///data/my%20archive/savepoints/savepoint-4-x/", "file:///data/my%20archive/savepoints"),
        ("s3://bucket/_old/savepoints/savepoint-4-x", "s3://bucket/_old/savepoints"),
        ("s3://bucket/archive/savepoint-4-x", "s3://bucket/archive"),
    ],
)
def test_the_storage_of_a_savepoint_that_is_in_no_pipelines_directory(location: str, root: str) -> None:
    assert storage_of(location) == (root, "elsewhere")
