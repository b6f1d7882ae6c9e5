"""The life of a sink's instance, without a real target: random histories over a table and a folder in memory, and its values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from dagster_checkpoints.sinks.branches import Branch, Branches, check_not_overwritten, overwritten
from dagster_checkpoints.sinks.engine import LedgerChanged, Op, SinkLife, SinkScope, Steps, drive
from dagster_checkpoints.sinks.ledger import (
    Change,
    Commit,
    JobLedger,
    Ledger,
    Moves,
    SinkOwner,
    Staged,
    StagedName,
    Unfinished,
    decode_ledger,
    decode_texts,
    encode_ledger,
    encode_text,
    parse_name,
    stored_ledger,
)
from dagster_checkpoints.systems.errors import (
    SinkAheadOfStorage,
    SinkCannotTakeBack,
    SinkFenced,
    SinkPathInUse,
    SinkTargetChanged,
    SinkTransactionConflict,
    SinkUnavailable,
    UnreadableSinkTransaction,
)
from simulation.sink_histories import simulate
from simulation.sinks import SinkSystem, Target


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_readers_see_exactly_the_rows_of_the_restored_checkpoint_in_random_histories(first: int) -> None:
    counts = Counter[str]()
    for seed in range(first, first + 300):
        broken, happened = simulate(seed)
        assert broken is None, f"seed {seed}: {broken}"
        counts.update(happened)
    kinds = ("go back", "new job", "older acts", "stopped while committing", "stopped while opening")
    assert all(counts[kind] > 50 for kind in kinds), counts


# Steps

SCOPE = SinkScope("shop", "sales", 1, 2, "4.h1", SinkOwner(3, "h1"), "abc")
T1 = Staged("e3.h1-abc-000000", Commit("4.h1", 1, 7), 2)


def life(*, stepped: bool = False, by_key: bool = False, **scope: Any) -> SinkLife:
    return SinkLife(msgspec.structs.replace(SCOPE, **scope), "ASink(x)", stepped=stepped, by_key=by_key)


def opened(system: SinkSystem, **settings: Any) -> tuple[SinkLife, Target]:
    one, target = life(stepped=system.stepped, **settings), Target(system, 1, settings.get("job", SCOPE.job))
    drive(one.open(), target)
    return one, target


def committed(target: Target, one: SinkLife, *ids: int) -> None:
    for number in ids:
        name = one.next_name()
        target.stage(name, (number,))
        drive(one.begin(number), target)
        drive(one.commit(Staged(name, Commit("4.h1", 1, number), 1)), target)


@pytest.fixture(params=[False, True], ids=["table", "folder"])
def system(request: pytest.FixtureRequest) -> SinkSystem:
    return SinkSystem(0, stepped=request.param)


def test_an_older_owner_is_refused_in_every_call_and_changes_nothing(system: SinkSystem) -> None:
    old, target = opened(system)
    target.stage(T1.name, (1, 2))
    opened(system, owner=SinkOwner(4, "h1"))
    before = (dict(system.visible), dict(system.staged), dict(system.ledgers))
    calls = {
        "open": old.open(),
        "commit": old.commit(T1),
        "abort": old.abort(T1),
        "recover": old.recover([T1], 7),
        "recover nothing": old.recover([], None),
        "settle": old.recover([], 3),
        "new start": life(stepped=system.stepped, attempt="later").new_start(replace=True),
    }
    for what, steps in calls.items():
        with pytest.raises(SinkFenced, match=r"ASink\(x\): expected no newer run than this one \(epoch 3\).*instance 1.*epoch 4"):
            drive(steps, target)
            raise AssertionError(what)
    assert (dict(system.visible), dict(system.staged), dict(system.ledgers)) == before


@pytest.mark.parametrize("stepped", [False, True])
def test_a_place_that_is_emptied_is_noticed_at_the_next_step_and_at_the_next_start(stepped: bool) -> None:
    system = SinkSystem(0, stepped)
    life, target = SinkLife(SCOPE, "ASink(x)", stepped=stepped, by_key=False), Target(system, 1, "4.h1")
    drive(life.new_start(replace=False), target)
    opened = system.copy()
    target.stage(T1.name, (1, 2))
    drive(life.commit(T1), target)
    full = system.copy()
    t2 = Staged("e3.h1-abc-000001", Commit("4.h1", 1, 8), 1)

    def acts() -> list[Steps[Any]]:
        return [life.commit(t2), life.abort(t2), life.recover([], 7), life.new_start(replace=True)]

    for lost, found in ((SinkSystem(0, stepped), "none of that job"), (opened, "none of that job")):
        system.put_back(lost)
        for act in acts():
            expected = (
                rf"ASink\(x\): expected recorded for instance 1 that .*4.h1 up to checkpoint 7 are committed, found {found}"
            )
            with pytest.raises(SinkTargetChanged, match=expected):
                drive(act, target)
        assert (system.visible, system.ledgers) == (lost.visible, lost.ledgers), "nothing is changed"
    # An attempt after that knows from its checkpoint what was committed.
    system.put_back(SinkSystem(0, stepped))
    after = msgspec.structs.replace(SCOPE, committed=T1.commit, attempt="def")
    with pytest.raises(SinkTargetChanged, match="checkpoint 7 are committed"):
        drive(SinkLife(after, "ASink(x)", stepped=stepped, by_key=False).open(), target)
    assert system.ledgers == {}
    system.put_back(full)
    drive(SinkLife(after, "ASink(x)", stepped=stepped, by_key=False).recover([], 7), target)
    assert system.visible == full.visible


@pytest.mark.parametrize("owner", [SinkOwner(), SinkOwner(2, "h1"), SinkOwner(9, "h2")])
def test_a_folder_without_the_owner_that_has_opened_it_is_another_one(owner: SinkOwner) -> None:
    system = SinkSystem(0, stepped=True)
    life, target = SinkLife(SCOPE, "ASink(x)", stepped=system.stepped, by_key=False), Target(system, 1, "4.h1")
    drive(life.new_start(replace=False), target)
    target.stage(T1.name, (1, 2))
    system.ledgers[1] = Ledger(owner)
    found = f"a run of epoch {owner.epoch}" if owner.epoch else "no run"
    with pytest.raises(SinkTargetChanged, match=f"the run of epoch 3, this one, writes there, found {found}"):
        drive(life.commit(T1), target)
    assert system.visible == {} and system.ledgers == {1: Ledger(owner)}


def test_an_owner_of_another_history_and_one_without_an_epoch_take_over(system: SinkSystem) -> None:
    opened(system)
    opened(system, owner=SinkOwner(1, "h2"))
    assert system.ledgers[1].owner == SinkOwner(1, "h2")
    without, target = opened(system, owner=SinkOwner())
    committed(target, without, 1)
    assert system.ledgers[1].owner == SinkOwner(1, "h2")


def test_a_storage_that_is_older_than_the_ledger_is_refused_before_anything_changes(system: SinkSystem) -> None:
    one, target = opened(system)
    committed(target, one, 6, 7)
    target.stage(T1.name, (1, 2))
    before = (dict(system.visible), dict(system.staged), dict(system.ledgers))
    older = life(stepped=system.stepped, attempt="later", owner=SinkOwner(4, "h1"), highest=6)
    for steps in (older.open(), older.new_start(replace=True)):
        with pytest.raises(SinkAheadOfStorage) as refused:
            drive(steps, target)
        assert str(refused.value) == AHEAD
    assert (dict(system.visible), dict(system.staged), dict(system.ledgers)) == before
    opened(system, job="5.h1", highest=6)


def test_a_storage_that_is_older_than_a_commit_that_has_begun_is_refused() -> None:
    system = SinkSystem(0, stepped=True)
    one, target = opened(system)
    target.stage(T1.name, (1, 2))
    calls_of(one.commit(T1), target, until="put_ledger")
    with pytest.raises(SinkAheadOfStorage, match="checkpoint 7"):
        drive(life(stepped=True, highest=6).open(), target)
    assert not system.visible
    drive(life(stepped=True, highest=7).open(), target)
    assert list(system.visible) == [T1.commit]


def test_what_an_instance_commits_itself_is_not_ahead_of_its_storage(system: SinkSystem) -> None:
    one, target = opened(system, highest=0)
    drive(one.new_start(replace=False), target)
    committed(target, one, 1, 2)


def test_after_the_ids_are_set_above_those_of_the_sink_an_older_storage_goes_on(system: SinkSystem) -> None:
    """The remedy in the error's text: the run takes back what came after its checkpoint, and commits under later ids."""
    one, target = opened(system)
    committed(target, one, 5, 6, 7)
    again = life(stepped=system.stepped, attempt="again", owner=SinkOwner(4, "h1"), highest=7)
    drive(again.recover([], 5), target)
    assert [commit.checkpoint for commit in system.visible] == [5]
    committed(target, again, 8, 9)
    assert sorted(commit.checkpoint for commit in system.visible) == [5, 8, 9]


def test_another_transaction_for_a_committed_checkpoint_is_refused_by_name(system: SinkSystem) -> None:
    one, target = opened(system)
    committed(target, one, 7)
    other = msgspec.structs.replace(T1, name="e3.h1-abc-000009")
    for steps in (one.commit(other), one.is_committed(other)):
        with pytest.raises(SinkTransactionConflict, match=r"checkpoint 7 of job 4\.h1, instance 1, found that 'e3"):
            drive(steps, target)
    assert drive(one.is_committed(T1), target) is True


def test_an_owner_that_opens_a_sink_changes_the_owner_alone() -> None:
    (plan,) = next(life().open()).args
    jobs = {"1": JobLedger(newest={0: 4})}
    assert plan(Ledger(SinkOwner(2, "h1"), jobs)) == Change(Ledger(SCOPE.owner, jobs), "4.h1")
    assert plan(Ledger(SCOPE.owner, jobs)) is None


def test_an_abort_deletes_what_is_staged_and_leaves_what_is_committed(system: SinkSystem) -> None:
    one, target = opened(system)
    committed(target, one, 7)
    target.stage("e3.h1-abc-000001", (8,))
    drive(one.abort(Staged("e3.h1-abc-000001", Commit("4.h1", 1, 8), 1)), target)
    drive(one.abort(T1), target)
    assert (system.staged, list(system.visible.values())) == ({}, [(7,)])


def test_a_new_start_replaces_the_rows_of_all_other_jobs(system: SinkSystem) -> None:
    one, target = opened(system)
    committed(target, one, 7)
    new, target = opened(system, job="5.h1", attempt="new")
    drive(new.new_start(replace=False), target)
    assert list(system.visible) == [Commit("4.h1", 1, 7)] and new.origin == 0
    drive(new.new_start(replace=True), target)
    assert (system.visible, system.ledgers[1].jobs) == ({}, {})


def test_a_job_that_begins_a_second_time_has_no_origin_where_it_has_rows(system: SinkSystem) -> None:
    one, target = opened(system)
    committed(target, one, 7)
    again, target = opened(system, attempt="again")
    drive(again.new_start(replace=True), target)
    assert again.origin is None and list(system.visible) == [Commit("4.h1", 1, 7)]


def test_rows_by_key_stay_and_a_restore_that_would_show_replaced_ones_is_refused(system: SinkSystem) -> None:
    one, target = opened(system, by_key=True)
    committed(target, one, 1, 2, 3)
    back, target = opened(system, by_key=True, attempt="back")
    drive(back.recover([], 1), target)
    assert len(system.visible) == 3 and back.origin == 1
    committed(target, back, 4)  # has replaced rows of 2 and 3
    with pytest.raises(SinkCannotTakeBack, match=r"^ASink\(x\): .*checkpoints 2, 3 may have been replaced"):
        drive(life(stepped=system.stepped, by_key=True, attempt="again").recover([], 3), target)
    drive(life(stepped=system.stepped, by_key=True, attempt="again").recover([], 1), target)


def test_rows_taken_back_that_a_savepoint_of_another_job_holds_are_shown_again(system: SinkSystem) -> None:
    one, target = opened(system)
    committed(target, one, 1, 2)
    drive(life(stepped=system.stepped, attempt="back").recover([], 1), target)
    assert list(system.visible) == [Commit("4.h1", 1, 1)]
    drive(one.commit(Staged("e3.h1-abc-000001", Commit("4.h1", 1, 2), 1)), target)
    assert sorted(system.visible) == [Commit("4.h1", 1, 1), Commit("4.h1", 1, 2)]


class Changing(Target):
    """A folder whose ledger is another one whenever it is to be replaced."""

    def put_ledger(self, ledger: Ledger) -> None:
        raise LedgerChanged


def test_an_error_of_the_target_reaches_the_step_that_has_called_it() -> None:
    def steps() -> Steps[str]:
        try:
            yield Op("read_ledger")
        except SinkUnavailable as error:
            return f"caught {error}"
        return "no error"

    class Away:
        def read_ledger(self) -> Ledger:
            raise SinkUnavailable("away")

    assert drive(steps(), Away()) == "caught away"


def test_the_steps_of_a_commit_in_a_folder_are_recorded_first_and_repeatable() -> None:
    system = SinkSystem(0, stepped=True)
    one, target = opened(system)
    target.stage(T1.name, (1, 2))
    assert calls_of(one.commit(T1), target) == ["read_ledger", "check_moves", "put_ledger", "publish", "put_ledger"]
    assert system.ledgers[1].unfinished is None


def test_only_transactions_of_earlier_attempts_and_owners_are_discarded(system: SinkSystem) -> None:
    """Those of a newer owner stay, also where it has come in the moment after the check; those of the attempt itself, too."""
    one, target = opened(system)
    own, of_another_owner = "e3.h1-abc-000007", "e2.h1-abc-000001"
    newer, other_history, garbage = "e4.h1-x-000000", "e4.h2-x-000000", "something"
    for name in (own, of_another_owner, "e3.h1-former-000000", newer, other_history, garbage):
        target.stage(name, (1,))
    drive(one.recover([], None), target)
    assert sorted(system.staged) == [own, newer]


def test_a_job_whose_rows_are_all_taken_back_begins_at_its_beginning(system: SinkSystem) -> None:
    one, target = opened(system)
    drive(one.new_start(replace=False), target)
    committed(target, one, 2)
    back = life(stepped=system.stepped, attempt="back")
    drive(back.recover([], 1), target)
    assert (list(system.visible), list(system.hidden)) == ([], [Commit("4.h1", 1, 2)])
    again = life(stepped=system.stepped, attempt="again")
    drive(again.new_start(replace=False), target)
    assert again.origin == 0


def test_a_restore_ends_every_exception_of_an_earlier_one(system: SinkSystem) -> None:
    one, target = opened(system)
    committed(target, one, 1, 2, 3)
    drive(life(stepped=system.stepped, attempt="back").recover([], 1), target)
    drive(one.commit(Staged("e3.h1-abc-000002", Commit("4.h1", 1, 3), 1)), target)  # another job's savepoint holds it
    assert sorted(commit.checkpoint for commit in system.visible) == [1, 3]
    drive(life(stepped=system.stepped, attempt="again").recover([], 2), target)
    assert sorted(commit.checkpoint for commit in system.visible) == [1, 2]
    assert system.ledgers[1].job("4.h1").again == ()


def calls_of(steps: Steps[Any], target: Target, until: str = "") -> list[str]:
    """The calls of steps, performed; the steps stop behind the first call of this name."""
    calls: list[str] = []
    answer: Any = None
    with suppress(StopIteration):
        while until not in calls:
            op = steps.send(answer)
            calls.append(op.name)
            answer = getattr(target, op.name)(*op.args)
    return calls


def test_what_is_recorded_already_is_not_written_again() -> None:
    system = SinkSystem(0, stepped=True)
    one, target = opened(system)
    assert calls_of(life(stepped=True).open(), target) == ["read_ledger"]
    drive(one.recover([], None), target)
    assert one.origin == 0 and calls_of(one.begin(1), target) == ["read_ledger"]
    committed(target, one, 1, 2)
    one.origin = 5
    assert calls_of(one.begin(5), target) == [] and one.origin == 5, "the checkpoint that it continues from is taken again"
    drive(one.recover([], 2), target)
    assert system.ledgers[1].job("4.h1").shown is None, "the newest checkpoint is restored"


def test_a_commit_that_has_begun_is_not_aborted() -> None:
    system = SinkSystem(0, stepped=True)
    one, target = opened(system)
    for name in (T1.name, "e3.h1-abc-000001"):
        target.stage(name, (1, 2))
    assert calls_of(one.commit(T1), target, until="put_ledger")[-1] == "put_ledger"
    other = Staged("e3.h1-abc-000001", Commit("4.h1", 1, 8), 2)
    assert [drive(one.is_committed(each), target) for each in (T1, other)] == [True, False]
    for each in (T1, other):
        drive(one.abort(each), target)
    assert list(system.staged) == [T1.name]
    drive(one.recover([], None), target)
    assert list(system.visible) == [T1.commit] and not system.staged


def test_a_change_of_an_earlier_owner_is_completed_under_the_name_of_the_newer_one() -> None:
    system = SinkSystem(0, stepped=True)
    old, target = opened(system)
    target.stage(T1.name, (1, 2))
    calls_of(old.commit(T1), target, until="put_ledger")
    newer = Target(system, 1, SCOPE.job)
    calls_of(life(stepped=True, owner=SinkOwner(4, "h1")).open(), newer, until="put_ledger")
    assert system.ledgers[1].owner == SinkOwner(4, "h1") and system.ledgers[1].unfinished is not None
    with pytest.raises(SinkFenced):
        drive(old.commit(T1), target)
    drive(life(stepped=True, owner=SinkOwner(4, "h1")).open(), newer)
    assert list(system.visible) == [T1.commit] and system.ledgers[1].unfinished is None


def test_a_new_start_that_was_suspended_removes_nothing_behind_a_newer_owner() -> None:
    class Suspended(Target):
        def other_jobs(self) -> list[str]:
            newer, target = opened(self.system, job="6.h1", owner=SinkOwner(4, "h1"))
            target.stage("e4.h1-abc-000000", (8,))
            drive(newer.commit(Staged("e4.h1-abc-000000", Commit("6.h1", 1, 8), 1)), target)
            return ["4.h1"]

    system = SinkSystem(0, stepped=True)
    one, target = opened(system)
    committed(target, one, 7)
    with pytest.raises(SinkFenced):
        drive(life(stepped=True, job="5.h1", attempt="new").new_start(replace=True), Suspended(system, 1, "5.h1"))
    assert list(system.visible) == [Commit("4.h1", 1, 7), Commit("6.h1", 1, 8)]


def test_a_ledger_that_another_run_has_changed_is_read_again() -> None:
    class ChangedOnce(Target):
        changed = False

        def put_ledger(self, ledger: Ledger) -> None:
            if not self.changed:
                self.changed = True
                raise LedgerChanged
            super().put_ledger(ledger)

    system = SinkSystem(0, stepped=True)
    drive(life(stepped=True).open(), ChangedOnce(system, 1, SCOPE.job))
    assert system.ledgers[1].owner == SCOPE.owner


def test_a_transaction_of_another_jobs_savepoint_is_visible_though_that_job_went_another_way(system: SinkSystem) -> None:
    one, target = opened(system)
    committed(target, one, 1, 3)
    drive(life(stepped=system.stepped, attempt="back").recover([], 1), target)
    saved = Staged("e3.h1-abc-000008", Commit("4.h1", 1, 4), 1)
    target.stage(saved.name, (4,))
    other = life(stepped=system.stepped, job="5.h1", attempt="other")
    drive(other.recover([saved], None), target)
    assert sorted(commit.checkpoint for commit in system.visible) == [1, 4]
    assert system.ledgers[1].job("4.h1").sees(4) and not system.ledgers[1].job("4.h1").sees(3)


FENCED = (
    "ASink(x): expected no newer run than this one (epoch 3) to write to this sink, found recorded for instance 1 that a run of "
    "epoch 4 does: that run has taken the pipeline over while this run was suspended or cut off; or the checkpoint storage is an "
    "older copy than the sink. This run stops and changes nothing"
)
AHEAD = (
    "ASink(x): expected that instance 1 has committed no checkpoint of job 4.h1 after 6, the highest id in the checkpoint "
    "storage, found that it has committed checkpoint 7: the storage is an older copy than the sink. Was it restored from a "
    "backup? The job would use these ids again, and its rows would be taken for rows that are committed. Nothing was changed. "
    "Put the newest storage back; or the sink's data as it was at the time of the backup; or, with every run stopped, set in "
    "state.json highest_checkpoint_id to at least 7 and epoch to at least 3: the next run then takes back the rows of later "
    "checkpoints, and writes them again; or begin a new job (restore_from: none)"
)
CONFLICT = (
    "ASink(x): expected no other transaction for checkpoint 7 of job 4.h1, instance 1, found that 'e3.h1-abc-000000' was "
    "committed for it, not 'e3.h1-abc-000009'. Nothing was changed. Was the checkpoint storage emptied or exchanged? Begin a new "
    "job, or give the sink another place"
)
CHANGING = (
    "ASink(x): expected that the record of instance 1 stays as it was read, found it changed by another run 20 times. Another "
    "attempt may succeed"
)


def test_what_the_errors_of_the_steps_say() -> None:
    system = SinkSystem(0, stepped=False)
    one, target = opened(system)
    committed(target, one, 7)
    with pytest.raises(SinkTransactionConflict) as conflict:
        drive(one.commit(msgspec.structs.replace(T1, name="e3.h1-abc-000009")), target)
    opened(system, owner=SinkOwner(4, "h1"))
    with pytest.raises(SinkFenced) as fenced:
        drive(one.commit(T1), target)
    with pytest.raises(SinkUnavailable) as changing:
        drive(life(stepped=True).open(), Changing(SinkSystem(0, stepped=True), 1, SCOPE.job))
    assert [str(error.value) for error in (conflict, fenced, changing)] == [CONFLICT, FENCED, CHANGING]


# Values


def test_a_text_is_decoded_to_the_transaction_that_it_was_made_of() -> None:
    staged = msgspec.structs.replace(T1, bytes=10, files=1, payload={"a": 1})
    text = encode_text("sql", "public.sales", staged)
    assert decode_texts([text], "sql", "public.sales", 1, "ASink(x)") == [staged]


TEXT = encode_text("sql", "public.sales", T1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "expected the text of one of its transactions, found ''"),
        ("{}", "Did the stage have another kind of sink, or did an earlier release"),
        ('{"sink":"sql","table":"t","token":"a","job":"1","index":0,"checkpoint":1,"rows":2,"version":1}', "an earlier release"),
        (TEXT.replace('"sql"', '"kafka"'), "it is of the kind 'kafka', version 2"),
        (TEXT.replace('"version":2', '"version":3'), "it is of the kind 'sql', version 3"),
        (TEXT.replace("public.sales", "public.others"), "of instance 1 for 'public.others'"),
        (TEXT.replace('"index":1', '"index":0'), "of instance 0 for 'public.sales'"),
        (TEXT.replace("e3.h1-abc-000000", "../../etc"), "found '../../etc'"),
    ],
)
def test_a_foreign_text_is_refused_by_name_before_any_other_is_looked_at(text: str, found: str) -> None:
    with pytest.raises(UnreadableSinkTransaction, match=r"^ASink\(x\): expected ") as refused:
        decode_texts([TEXT, text], "sql", "public.sales", 1, "ASink(x)")
    assert found in str(refused.value)


KIND = "Did the stage have another kind of sink when the checkpoint was taken? Restore with that kind of sink, or start the job "


def test_what_the_refusal_of_a_text_says() -> None:
    said = []
    for text in ("{", TEXT.replace('"sql"', '"kafka"'), TEXT.replace("public.sales", "t")):
        with pytest.raises(UnreadableSinkTransaction) as refused:
            decode_texts([text], "sql", "public.sales", 1, "ASink(x)")
        said.append(str(refused.value).replace(text, "TEXT"))
    assert said == [
        "ASink(x): expected the text of one of its transactions, found 'TEXT': Input data was truncated. Did the stage have "
        "another kind of sink, or did an earlier release of dagster-checkpoints run, when the checkpoint was taken? Restore with "
        "that, or start the job without restoring",
        "ASink(x): expected the text of one of its transactions, found 'TEXT': it is of the kind 'kafka', version 2. "
        f"{KIND}without restoring",
        "ASink(x): expected a transaction of instance 1 for 'public.sales', found 'e3.h1-abc-000000' of instance 1 for 't': the "
        "stage's sink wrote to another place when the checkpoint was taken. Restore with that place, or start the job without "
        "restoring",
    ]


@pytest.mark.parametrize(
    ("commits", "lost"),
    [(1, "checkpoint 2"), (2, "checkpoints 2, 3"), (5, "checkpoints 2, 3, 4, 5, 6"), (6, "checkpoints 2, 3, 4, 5, 6, …")],
)
def test_what_the_refusal_of_a_restore_by_key_says(commits: int, lost: str) -> None:
    last = 1 + commits
    branches = Branches((Branch(1, last + 1),))
    with pytest.raises(SinkCannotTakeBack) as refused:
        check_not_overwritten(branches, last, [*range(1, last + 2)], "ASink(x)")
    assert str(refused.value) == (
        f"ASink(x): expected that the table still shows the rows on the way to checkpoint {last}, found that the rows of {lost} "
        "may have been replaced: the job was restored from an older checkpoint after them, and went another way. Restore the "
        "newest checkpoint, or one that is older than the place where the ways part; or begin a new job with "
        "at_new_start='replace'"
    )


@pytest.mark.parametrize(
    "name",
    [StagedName(SinkOwner(), "a-b", 0), StagedName(SinkOwner(12, "h1"), "x.y_z", 7), StagedName(SinkOwner(1), "e4-5", 1_000_000)],
)
def test_a_name_says_who_has_staged_a_transaction(name: StagedName) -> None:
    assert parse_name(name.text) == name
    assert parse_name(f"{name.text}.") is None


def test_owners_of_two_histories_cannot_be_compared() -> None:
    assert SinkOwner(3, "h1").is_replaced_by(SinkOwner(4, "h1"))
    assert not SinkOwner(4, "h1").is_replaced_by(SinkOwner(4, "h1"))
    assert not SinkOwner(3, "h1").is_replaced_by(SinkOwner(4, "h2"))
    assert not SinkOwner(0, "h1").is_replaced_by(SinkOwner(4, "h1"))


def test_a_ledger_is_read_as_it_was_written() -> None:
    job = JobLedger(Branches((Branch(3, 6),)), {0: 5, 6: 8}, (8, "n"), ((0, 1), (6, 6)), 7, (2,))
    ledger = Ledger(SinkOwner(3, "h1"), {"1": job}, Unfinished("1", Moves((T1,), (T1.commit,), (T1.commit,)), job))
    assert stored_ledger(encode_ledger(ledger), "the row") == decode_ledger(encode_ledger(ledger)) == ledger
    with pytest.raises(SinkPathInUse) as refused:
        stored_ledger(encode_ledger(msgspec.structs.replace(ledger, version=2)), "the row of instance 1")
    assert isinstance(refused.value.__cause__, msgspec.DecodeError)
    assert str(refused.value) == (
        "expected the row of instance 1 to say what an instance of the sink has committed, found a record that cannot be "
        "read: expected version 1, found 2, of a later release. Restore it from a backup; or delete it if no checkpoint or "
        "savepoint of the job will be restored; or give the sink another place"
    )


def test_a_ledger_with_a_damaged_name_is_never_misread() -> None:
    """The field of that name would have its default: rows that were taken back would be seen again, half a change forgotten."""
    job = JobLedger(Branches((Branch(3, 6),)), {0: 5, 6: 8}, (8, "n"), ((0, 1), (6, 6)), 7, (2,))
    data = encode_ledger(Ledger(SinkOwner(3, "h1"), {"1": job}, Unfinished("1", Moves((T1,), (T1.commit,), (T1.commit,)), job)))
    names = list(re.finditer(rb'"([a-z]+)":', data))
    assert len(names) > 30
    for name in names:
        damaged = data[: name.start(1)] + bytes([data[name.start(1)] ^ 1]) + data[name.start(1) + 1 :]
        with pytest.raises(SinkPathInUse):
            stored_ledger(damaged, "the row")


def test_a_branch_is_recorded_only_where_a_checkpoint_is_left_out() -> None:
    assert Branches().begun(3, 4) == Branches()
    assert Branches().begun(3, 5) == Branches((Branch(3, 5),))
    assert Branches((Branch(3, 5),)).begun(3, 5) == Branches((Branch(3, 5),))
    assert Branches((Branch(3, 7),)).begun(5, 6) == Branches()


def test_commits_are_ordered_as_they_were_made_on_all_branches() -> None:
    """Restored from 1, the job takes 5 next; then savepoint 4 of its first branch is restored, and its transaction committed."""
    job = JobLedger()
    for number in (1, 2, 3):
        job = job.committed(number, f"n{number}")
    job = job.begun(1, 5).committed(5, "n5").committed(6, "n6").committed(4, "n4")
    assert job.in_order({1, 2, 3, 4, 5, 6}) == [1, 2, 3, 5, 6, 4]
    assert (job.latest, job.newest, job.stretches) == ((4, "n4"), {0: 4, 5: 6}, ((0, 1), (5, 5), (0, 4)))
    assert [number for number in range(1, 8) if job.is_committed(number)] == [1, 2, 3, 4, 5, 6]
    assert [number for number in range(1, 8) if job.sees(number)] == [1, 5, 6, 7]
    for stretches in ((), ((0, 3),)):
        older = JobLedger(newest={0: 4}, stretches=stretches)
        assert older.in_order([4, 3, 2, 1]) == [1, 2, 3, 4], "of a release that recorded no stretches"


# 1 … 4; restored from 2, then 5, 6; restored from 4, then 7
TREE = Branches((Branch(2, 5), Branch(4, 7)))


@pytest.mark.parametrize(
    ("restored", "commits", "lost"),
    [
        (4, [1, 2, 3, 4], []),
        (2, [1, 2, 3, 4], []),  # 3 and 4 are written again
        (6, [1, 2, 3, 4, 5, 6], []),  # 5 and 6 came after 3 and 4
        (4, [1, 2, 3, 4, 5, 6], [3, 4]),
        (3, [1, 2, 3, 4, 5], [3]),
        (4, [1, 2, 5, 3, 4], []),  # committed after 5
        (2, [1, 2, 3, 4, 5, 6], []),
        (7, [1, 2, 3, 5, 4, 7], [3]),
        (5, [1, 2, 5, 4, 7], [5]),
    ],
)
def test_commits_whose_rows_another_branch_may_have_replaced(restored: int, commits: Sequence[int], lost: list[int]) -> None:
    assert sorted(overwritten(TREE, restored, commits)) == lost


@pytest.mark.parametrize(
    ("went", "restored", "way"),
    [
        ([], 5, [1, 2, 3, 4, 5]),
        ([(3, 6)], 8, [1, 2, 3, 6, 7, 8]),
        ([(3, 6)], 5, [1, 2, 3, 4, 5]),
        ([(3, 6), (7, 9)], 9, [1, 2, 3, 6, 7, 9]),
        ([(3, 6), (4, 9)], 9, [1, 2, 3, 4, 9]),
        ([(3, 6), (4, 9)], 8, [1, 2, 3, 6, 7, 8]),
        ([(0, 4)], 5, [4, 5]),
        ([(3, 4)], 5, [1, 2, 3, 4, 5]),
        ([(3, 6), (2, 6)], 7, [1, 2, 6, 7]),  # id 6 is used again: no checkpoint with it was ever completed
    ],
)
def test_which_checkpoints_are_ancestors_of_another(went: list[tuple[int, int]], restored: int, way: list[int]) -> None:
    branches = Branches()
    for origin, first in went:
        branches = branches.begun(origin, first)
    assert [n for n in range(1, 12) if branches.is_ancestor(n, restored)] == way
