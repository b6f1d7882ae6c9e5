"""The sink of the page on writing one passes the suite, and the suite finds what is wrong with it when it is broken."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dagster_checkpoints.testing import SinkConformance

PAGE = (Path(__file__).parents[2] / "docs/sinks/own.md").read_text(encoding="utf-8")
TARGET, TARGET_TEST, SINK, TEST = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PAGES = {"the whole contract": (SINK, TEST), "a target": (TARGET, TARGET_TEST)}
BROKEN = {
    "rows are visible when they are written": (
        'self.staged / f"{self.context.epoch}-{self.context.attempt}-{checkpoint_id}"',
        'self.folder / f"checkpoint-{checkpoint_id}-0.jsonl"',
    ),
    "a commit cannot be repeated": ("elif not target.exists():", "else:"),
    "only the last batch is written": ("self.batches[batch_id] =", "self.batches[0] ="),
    "a batch that is written again is written twice": ("self.batches[batch_id] =", "self.batches[len(self.batches)] ="),
    "rows of an earlier job are not noticed": ('any(self.folder.glob("checkpoint-*"))', "False"),
    "an older owner aborts what a newer one has staged": ('int(staged.name.split("-")[0]) <= self.context.epoch', "True"),
    "a restore does not commit": ("            self.commit(transaction)\n", "            pass\n"),
    "a restore aborts before it commits": (
        "        for transaction in committed:\n            self.commit",
        "        self.start_new()\n        for transaction in committed:\n            self.commit",
    ),
    "a savepoint's rows are not put back": ("if files and not staged.exists()", "if not files and not staged.exists()"),
    "an older checkpoint's later rows stay": ("if restored is not None and", "if restored == -1 and"),
    "an aborted checkpoint's rows are replaced": ('"target": f"checkpoint-{checkpoint_id}-', '"target": f"checkpoint-1-'),
    "the number of rows is wrong": ('"rows": len(rows)', '"rows": 1'),
}


BROKEN_TARGET = {
    "rows that are taken back stay visible": ('database.execute(f"DELETE FROM {source} WHERE {OF}", which)', "pass"),
    "a commit is not recorded": ("encode_ledger(change.ledger)))", "encode_ledger(self.ledger(database))))"),
    "a savepoint's rows are not put back": ('files["entries"].read_text()', '""'),
    "a batch that is written again is written twice": ("name = ? AND batch = ?", "name = ? AND batch = -1 - ?"),
}


def suite_of(folder: Path, sink: str, monkeypatch: pytest.MonkeyPatch, test: str = TEST) -> SinkConformance:
    """The page's test class, for this source text of its sink."""
    monkeypatch.syspath_prepend(str(folder))
    modules = {}
    kind = "json_lines_sink" if test == TEST else "entries_sink"
    for name, text in ((kind, sink), (f"test_{kind}", test)):
        file = folder / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        modules[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, modules[name])
        spec.loader.exec_module(modules[name])
    return suite_in(modules[f"test_{kind}"])


def suite_in(module: ModuleType) -> SinkConformance:
    suite = module.TestJsonLinesSink() if hasattr(module, "TestJsonLinesSink") else module.TestEntriesSink()
    assert isinstance(suite, SinkConformance)
    return suite


def first_failure(suite: SinkConformance, folder: Path) -> str | None:
    """The first test of the suite that does not pass; kills are in processes/test_killed_sinks.py."""
    for name in sorted(name for name in dir(suite) if name.startswith("test_") and "killed" not in name):
        (folder / name).mkdir()
        try:
            getattr(suite, name)(folder / name)
        except Exception:
            return name
    return None


@pytest.mark.parametrize("kind", PAGES)
def test_the_sink_of_the_page_passes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, test = PAGES[kind]
    assert first_failure(suite_of(tmp_path, sink, monkeypatch, test), tmp_path) is None


@pytest.mark.parametrize("broken", BROKEN)
def test_the_suite_finds_a_broken_sink(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = BROKEN[broken]
    assert SINK.count(old) == 1
    assert first_failure(suite_of(tmp_path, SINK.replace(old, new), monkeypatch), tmp_path) is not None


@pytest.mark.parametrize("broken", BROKEN_TARGET)
def test_the_suite_finds_a_broken_target(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = BROKEN_TARGET[broken]
    assert TARGET.count(old) == 1
    assert first_failure(suite_of(tmp_path, TARGET.replace(old, new), monkeypatch, TARGET_TEST), tmp_path) is not None
