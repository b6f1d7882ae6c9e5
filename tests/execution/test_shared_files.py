"""The names of state files, and how one is stored."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from dagster_checkpoints.errors import StorageUnavailable
from dagster_checkpoints.execution.shared_files import PutFile, SharedName, SharedNames, StoredName, name_stored, store_file
from tests.execution.storage_scripts import follow

A = "a" * 64


class Registry:
    """The files in storage, and the calls made."""

    def __init__(self, *stored_names: str) -> None:
        self.stored_names = set(stored_names)
        self.calls: list[tuple[str, Hashable, str]] = []

    def lend(self, borrower: Hashable, name: str) -> bool:
        self.calls.append(("lend", borrower, name))
        return name in self.stored_names

    def reserve(self, checkpoint: Hashable, name: str) -> bool:
        self.calls.append(("reserve", checkpoint, name))
        return name not in self.stored_names

    def stored(self, checkpoint: Hashable, name: str) -> None:
        self.calls.append(("stored", checkpoint, name))


@pytest.mark.parametrize(("name", "expected"), [(A, (A, 0)), (f"{A}-1", (A, 1)), (f"{A}-20", (A, 20))])
def test_a_file_name_holds_the_content_hash_and_the_owners_epoch(name: str, expected: tuple[str, int]) -> None:
    found = SharedName.parse(name)
    assert found == expected and str(found) == name


@pytest.mark.parametrize("name", ["", "a", A[1:], f"{A}-", f"{A}-0", f"{A}-01", f"{A}-1.tmp", f" {A}", f"{A.upper()}"])
def test_other_names_are_not_the_packages(name: str) -> None:
    assert SharedName.parse(name) is None


def test_a_new_file_is_named_first_then_stored_under_the_owners_own_name() -> None:
    registry = Registry()
    names = SharedNames(lambda: 3)
    assert names.own(A) == SharedName(A, 3) and names.earlier(A) is None
    assert follow(store_file(names, registry, "c", A), (PutFile(f"{A}-3"), None)) == StoredName(SharedName(A, 3), uploaded=True)
    assert registry.calls == [("lend", "c", f"{A}-3"), ("reserve", "c", f"{A}-3"), ("stored", "c", f"{A}-3")]


def test_a_file_that_could_not_be_stored_is_not_recorded_as_stored() -> None:
    registry = Registry()
    with pytest.raises(StorageUnavailable):
        follow(store_file(SharedNames(lambda: 3), registry, "c", A), (PutFile, StorageUnavailable("away")))
    assert registry.calls == [("lend", "c", f"{A}-3"), ("reserve", "c", f"{A}-3")]


def test_a_file_of_this_owner_is_not_stored_again() -> None:
    registry = Registry(f"{A}-3")
    assert follow(store_file(SharedNames(lambda: 3), registry, "c", A)) == StoredName(SharedName(A, 3), uploaded=False)
    assert registry.calls == [("lend", "c", f"{A}-3")]


def test_a_file_of_an_earlier_owner_keeps_its_name_while_it_exists() -> None:
    names = SharedNames(lambda: 3)
    names.known([SharedName("b", 1), SharedName(A, 2)])
    assert names.earlier(A) == SharedName(A, 2) and names.earlier("b") == SharedName("b", 1)
    registry = Registry(f"{A}-2")
    assert follow(store_file(names, registry, "c", A)) == StoredName(SharedName(A, 2), uploaded=False)
    assert registry.calls == [("lend", "c", f"{A}-2")]
    gone = Registry()
    assert follow(store_file(names, gone, "c", A), (PutFile(f"{A}-3"), None)).uploaded
    assert [call[0] for call in gone.calls] == ["lend", "lend", "reserve", "stored"]


@pytest.mark.parametrize(
    ("in_storage", "found"),
    [((), None), ((f"{A}-3",), 3), ((f"{A}-2",), 2), ((f"{A}-2", f"{A}-3"), 2), ((f"{A}-1",), None)],
)
def test_a_file_is_named_without_being_stored_if_this_owner_or_a_known_one_has_stored_it(
    in_storage: tuple[str, ...], found: int | None
) -> None:
    names = SharedNames(lambda: 3)
    names.known([SharedName(A, 2)])
    registry = Registry(*in_storage)
    assert name_stored(names, registry, "c", A) == (None if found is None else SharedName(A, found))
    assert all(call == "lend" for call, _, _ in registry.calls)
