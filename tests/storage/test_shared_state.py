"""References of checkpoints to shared files, and waits while files are deleted."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_checkpoints.errors import CheckpointDiscarded
from dagster_checkpoints.storage.shared_files import SharedStateRegistry

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["register", "reserve", "stored", "discard", "sweep", "lend", "return"]),
        st.integers(1, 5),
        st.sets(st.sampled_from("abcd"), min_size=1),
    ),
    max_size=25,
)


@given(steps=_STEPS)
def test_a_file_is_deleted_exactly_when_no_checkpoint_names_it(steps: list[tuple[str, int, set[str]]]) -> None:
    registry = SharedStateRegistry()
    names: dict[int, set[str]] = {}
    stored: set[str] = set()
    discarded: set[int] = set()
    for action, checkpoint, hashes in steps:
        named = set().union(*names.values())
        if action in ("register", "reserve") and checkpoint in discarded:
            with pytest.raises(CheckpointDiscarded):
                registry.register(checkpoint, hashes) if action == "register" else registry.reserve(checkpoint, "a")
        elif action == "register":
            registry.register(checkpoint, hashes)
            names.setdefault(checkpoint, set()).update(hashes)
        elif action == "reserve":
            for hash_ in hashes:
                assert registry.reserve(checkpoint, hash_) == (hash_ not in stored)
                names.setdefault(checkpoint, set()).add(hash_)
        elif action == "stored":
            for hash_ in hashes:
                registry.stored(checkpoint, hash_)
            stored |= hashes & names.get(checkpoint, set())
        elif action == "lend":
            borrower = -checkpoint
            for hash_ in hashes:
                assert registry.lend(borrower, hash_) == (hash_ in stored)
            if hashes & stored:
                names.setdefault(borrower, set()).update(hashes & stored)
        elif action == "return":
            gone = names.pop(-checkpoint, set()) - set().union(*names.values())
            with registry.returning(-checkpoint) as orphans:
                assert orphans == gone
            stored -= gone
        elif action == "sweep":
            with registry.sweeping(hashes) as orphans:
                assert orphans == hashes - named
            stored &= named
        else:
            discarded.add(checkpoint)
            gone = names.pop(checkpoint, set()) - set().union(*names.values())
            with registry.discarding(checkpoint) as orphans:
                assert orphans == gone
            stored -= gone
        assert registry.referenced() == set().union(*names.values())
        assert registry.checkpoints() == names.keys()


def test_a_checkpoint_that_needs_a_file_during_its_deletion_waits_and_uploads_it_again() -> None:
    registry = SharedStateRegistry()
    registry.reserve(1, "a")
    registry.stored(1, "a")
    order: list[str] = []
    waiting = threading.Event()

    def want() -> None:
        waiting.set()
        needed = registry.reserve(2, "a")
        order.append(f"upload {needed}")

    thread = threading.Thread(target=want)
    with registry.discarding(1) as orphans:
        assert orphans == {"a"}
        thread.start()
        assert waiting.wait(10)
        thread.join(0.05)  # the thread cannot pass, with any time-out
        assert thread.is_alive()
        order.append("deleted")
    thread.join(10)
    assert order == ["deleted", "upload True"]


def test_a_file_that_is_being_deleted_is_not_lent() -> None:
    registry = SharedStateRegistry()
    registry.reserve(1, "a")
    registry.stored(1, "a")
    with registry.discarding(1):
        registry.known(["a"])
        assert not registry.lend("reader", "a")
    registry.known(["a"])
    assert registry.lend("reader", "a")
    with registry.sweeping(["a"]) as orphans:
        assert orphans == set()


def test_a_deletion_that_fails_leaves_the_file_to_be_uploaded_again() -> None:
    registry = SharedStateRegistry()
    registry.reserve(1, "a")
    registry.stored(1, "a")
    try:
        with registry.discarding(1):
            raise OSError
    except OSError:
        pass
    assert registry.reserve(2, "a") is True


def test_a_run_of_months_remembers_only_the_last_discarded_checkpoints() -> None:
    registry = SharedStateRegistry()
    tracemalloc.start()
    try:
        for number in range(30_000):
            if number == 15_000:
                before = tracemalloc.get_traced_memory()[0]
            registry.register((number, 1), ["a"])
            with registry.discarding((number, 1)):
                pass
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
    with pytest.raises(CheckpointDiscarded):
        registry.reserve((29_999, 1), "a")


def test_a_file_that_another_program_has_deleted_is_uploaded_again() -> None:
    registry = SharedStateRegistry()
    registry.known({"a", "b"})
    assert registry.names_stored() == {"a", "b"}
    assert registry.lost({"b", "c"}) == {"b"}, "c was never stored"
    assert (registry.reserve(1, "a"), registry.reserve(1, "b")) == (False, True)
    assert not registry.lend(2, "b")
    registry.stored(1, "b")
    assert registry.lost(()) == frozenset() and not registry.reserve(3, "b")
