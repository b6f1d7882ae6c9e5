"""Names in the documentation exist, its examples run, and its links have targets."""

from __future__ import annotations

import ast
import enum
import inspect
import json
import os
import re
import runpy
import shlex
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, get_args

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]

import dagster_checkpoints
from dagster_checkpoints import (
    CheckpointCoordinatorResource,
    DagsterStageTranslator,
    SavepointConfig,
    Stage,
    TwoPhaseCommitSink,
    savepoint_asset,
    sensors,
    testing,
)
from dagster_checkpoints.cli.app import app
from dagster_checkpoints.control import PipelineControl
from dagster_checkpoints.control.metrics import METRICS
from dagster_checkpoints.control.request_box import RequestBox
from dagster_checkpoints.control.requests import Answer, ControlRequest
from dagster_checkpoints.coordination.config import CheckpointConfig
from dagster_checkpoints.coordination.failures import FailureReason
from dagster_checkpoints.execution import pipeline_state, trace
from dagster_checkpoints.execution.pipeline_state import Job, Owner
from dagster_checkpoints.plugin.materializations import COMMIT_LABELS
from dagster_checkpoints.plugin.observations import STAGE_LABELS
from dagster_checkpoints.plugin.run_config import PipelineRunConfig
from dagster_checkpoints.plugin.savepoints.check import SavepointCheckConfig
from dagster_checkpoints.plugin.settings import KnownSettings
from dagster_checkpoints.plugin.stage_assets import FINISHED_BEFORE
from dagster_checkpoints.spark.session.work_directory import parse_work_directory
from dagster_checkpoints.spark.stored_state import CheckpointExport, CheckpointImport, InstanceOffsets, KeyedState, StageState
from dagster_checkpoints.state import metadata
from dagster_checkpoints.state.claim import ClaimMode
from dagster_checkpoints.state.spark_versions import SUPPORTED_SPARK_TEXT
from dagster_checkpoints.storage import CheckpointStorage, open_store

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
SINKS = sorted((REPOSITORY / "docs/sinks").glob("*.md"))
SOURCES = sorted((REPOSITORY / "docs/sources").glob("*.md"))
STEPS = sorted((REPOSITORY / "docs/tutorial").glob("*.md"))
RECIPES = sorted((REPOSITORY / "docs/recipes").glob("*.md"))
PAGES = [README, *DOCS, *SINKS, *SOURCES, *STEPS, *RECIPES]
ALL_PAGES = [
    *PAGES,
    *(REPOSITORY / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/shop/README.md")),
]
PROTOCOL = REPOSITORY / "docs/protocol.md"
CONFIGURATION = REPOSITORY / "docs/configuration.md"
API = REPOSITORY / "docs/api.md"
RUNS_THESE = [
    README,
    *SINKS,
    *SOURCES,
    *(
        REPOSITORY / "docs" / f"{name}.md"
        for name in ("assets", "cluster", "migrating", "monitoring", "operations", "sensors", "state", "testing")
    ),
]


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


def prose(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# Links


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub creates them."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("page", ALL_PAGES, ids=name)
def test_links_have_existing_targets(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)} links to {link}; {name(target)} has {sorted(anchors(target))}"


TABLES = runpy.run_path(str(REPOSITORY / "docs/settings.py"))
"""What writes the tables of settings."""
SITE = runpy.run_path(str(REPOSITORY / "docs/conf.py"))
"""What `make docs` is configured with; it needs no generator to be read."""


def test_every_page_is_once_in_the_navigation_of_the_site() -> None:
    listed = [f"{page}.md" for _, pages in SITE["navigation"]() for _, page, _ in pages]
    assert sorted([*listed, f"{SITE['root_doc']}.md"]) == sorted(name(page) for page in ALL_PAGES)
    assert set(ALL_PAGES) >= set((REPOSITORY / "docs").rglob("*.md"))
    assert "docs/index.md" in README.read_text(encoding="utf-8")


def test_the_list_for_language_models_has_every_page() -> None:
    text = SITE["llms_txt"]()
    assert text.startswith("# dagster-checkpoints\n\n> dagster-checkpoints is a Dagster plugin")
    assert text.count(".md.txt): ") == len(ALL_PAGES) - 1


# Words

NOT_WRITTEN = ("whoever", "nobody", "somebody", "anew", "superfluous", "reins", "lies", "in vain")
"""Words that hide the subject, or that readers with another first language had to look up."""


@pytest.mark.parametrize("page", ALL_PAGES, ids=name)
def test_the_pages_name_their_subjects(page: Path) -> None:
    words = re.sub(r"`[^`\n]*`", "", prose(page)).lower()
    assert re.findall(rf"\b(?:{'|'.join(NOT_WRITTEN)})\b", words) == []


# Errors


@cache
def errors() -> frozenset[str]:
    """The names of all errors that the plugin raises on purpose."""
    found = {"DagsterCheckpointsError"}
    for file in (REPOSITORY / "dagster_checkpoints").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.bases:
                found.add(node.name)
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_error_named_exists(page: Path) -> None:
    named = set(re.findall(r"`([A-Z]\w+(?:Error|Failed|Changed|Gone|InUse|Rows|Lost|Unavailable|NotFound))`", prose(page)))
    assert named - errors() == set()


# The map of the protocol


@cache
def defined(file: Path) -> frozenset[str]:
    """The functions, classes and variables at the top of a file."""
    names = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Assign(targets=[ast.Name(id)]):
                names.append(id)
    return frozenset(names)


def rows_of_the_map() -> list[tuple[str, list[str], list[str]]]:
    """Section, modules and tests of each row of the tables in docs/protocol.md."""
    rows = []
    for line in PROTOCOL.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
        if len(cells) == 4 and not cells[-1].startswith("tests"):
            rows.append((f"{cells[0]}: {cells[1]}", *(re.findall(r"`([^`]+)`", cell) for cell in cells[2:])))
    return rows  # type: ignore[return-value]


def test_every_module_and_test_of_the_map_exists() -> None:
    rows = rows_of_the_map()
    assert len(rows) > 50
    for section, modules, tests in rows:
        assert tests, f"no test shows {section}"
        for module in modules:
            assert (REPOSITORY / "dagster_checkpoints" / module).is_file(), f"{module} ({section})"
        for test in tests:
            path, _, function = test.partition("::")
            file = REPOSITORY / "tests" / path
            assert file.is_file(), f"{test} ({section})"
            assert function.startswith(("test_", "Test")) and function in defined(file), f"{test} ({section})"


CHANGES = REPOSITORY / "docs/changes.md"


def test_every_change_is_allowed_or_refused_by_name_and_names_its_tests() -> None:
    lines = [line for line in CHANGES.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| change |")]
    assert len(rows) > 25
    shown = json.loads((REPOSITORY / "tests/readme/changes.json").read_text(encoding="utf-8"))
    assert [change for change, *_ in rows] == list(shown), "changes.json names the tests of each row, in their order"
    for change, allowed, _ in rows:
        assert re.match(r"yes|no:|some|from a savepoint|the sink refuses|`\w+`$", allowed), f"{change}: {allowed}"
        assert re.findall(r"`([A-Z]\w+)`", allowed) == [name for name in re.findall(r"`([A-Z]\w+)`", allowed) if name in errors()]
        assert shown[change], f"no test shows: {change}"
        for test in shown[change]:
            path, _, function = test.partition("::")
            assert function in defined(REPOSITORY / "tests" / path), f"{test} ({change})"


def test_every_file_of_the_architecture_exists_and_every_layer_is_in_the_picture() -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text))
    assert len(files) > 30
    assert sorted(file for file in files if not (REPOSITORY / "dagster_checkpoints" / file).is_file()) == []
    layers = {path.name for path in (REPOSITORY / "dagster_checkpoints").iterdir() if (path / "__init__.py").is_file()}
    (picture,) = (block for block in text.split("```") if "┌" in block)
    assert sorted(layer for layer in layers if f"{layer}/" not in picture) == []
    rooms = {path.name for path in (REPOSITORY / "dagster_checkpoints/spark").iterdir() if (path / "__init__.py").is_file()}
    assert sorted(room for room in rooms if room not in picture) == []


def test_the_page_of_support_names_the_versions_of_the_formats_and_of_spark() -> None:
    text = (REPOSITORY / "docs/support.md").read_text(encoding="utf-8")
    rows = {cells[0].strip(): cells[1].strip() for line in text.splitlines() if len(cells := line.strip("|").split("|")) > 2}
    assert rows["`_metadata` of checkpoints and savepoints"] == str(metadata.VERSION)
    assert rows["`state.json`"] == str(pipeline_state.VERSION)
    assert rows["traces of `replay`"] == str(trace.VERSION)
    assert f"Spark {rows['Spark (PySpark)'].replace('4.2, 4.3', '4.2 or 4.3')}" == SUPPORTED_SPARK_TEXT


def test_the_map_has_a_table_for_each_proposal() -> None:
    headings = re.findall(r"^## (.+)$", PROTOCOL.read_text(encoding="utf-8"), re.MULTILINE)
    assert [heading.split(":")[0] for heading in headings[:2]] == ["FLIP-147", "FLIP-34"]
    cited = set()
    for file in (REPOSITORY / "dagster_checkpoints").rglob("*.py"):
        cited |= set(re.findall(r"FLIP-\d+", file.read_text(encoding="utf-8")))
    assert {"FLIP-147", "FLIP-34"} <= cited
    for proposal in cited:
        assert re.search(rf"{proposal}\b", PROTOCOL.read_text(encoding="utf-8")), f"{proposal} is cited, and not in {PROTOCOL}"


# Commands


def commands() -> list[tuple[Path, str]]:
    found = [
        (page, line.strip())
        for page in PAGES
        for block in blocks(page, "(?:shell|console|bash|sh)")
        for line in block.splitlines()
    ]
    found += [(page, code) for page in PAGES for code in re.findall(r"`([^`\n]+)`", prose(page))]
    typed = [(page, re.split(r" (?:2?>|\|\|)", line.removeprefix("$ "))[0]) for page, line in found]
    return [(page, line) for page, line in typed if line.startswith("dagster-checkpoints ")]


def test_every_command_shown_can_be_typed() -> None:
    shown = commands()
    assert len(shown) > 15
    for page, line in shown:
        _, command_name, *arguments = shlex.split(line, comments=True)
        if command_name.startswith("-"):
            continue
        command = app.get_command(app.make_context("dagster-checkpoints", [], resilient_parsing=True), command_name)
        assert command is not None, f"{name(page)}: {line}"
        if arguments not in (["-h"], ["--help"]):
            command.make_context(command_name, arguments)


# Settings

DOCUMENTED_CLASSES = [Stage, DagsterStageTranslator, CheckpointCoordinatorResource, TwoPhaseCommitSink, PipelineControl]
"""Those whose methods a user calls or overrides."""


def known_names() -> set[str]:
    """The names with an underscore that exist: settings, parameters, exported names, names of the code location."""
    from assets import flights, flights_assets
    from definitions import defs

    configs = (CheckpointCoordinatorResource, PipelineRunConfig, SavepointConfig, SavepointCheckConfig, CheckpointConfig, Job)
    names = {field for config in configs for field in inspect.signature(config).parameters}
    exported = [getattr(module, each) for module in (dagster_checkpoints, sensors, testing) for each in module.__all__]
    for each in [*exported, CheckpointCoordinatorResource.run, PipelineControl.savepoint]:
        if not (inspect.isclass(each) and issubclass(each, Exception)):
            names |= {getattr(each, "__name__", ""), *inspect.signature(each).parameters}
    names |= {member for kind in DOCUMENTED_CLASSES for member in vars(kind) if not member.startswith("_")}
    for config, field in ((CheckpointCoordinatorResource, "restart_strategy"), (PipelineRunConfig, "until")):
        names |= set(get_args(config.model_fields[field].annotation))
    names |= {mode.value for mode in ClaimMode} | {file.name for file in (REPOSITORY / "assets").glob("*.py")}
    names |= {*vars(flights), *vars(flights_assets), *(defs.resources or {}), *DAGSTERS, *OF_LAUNCHERS}
    names |= {node.name for node in ast.walk(ast.parse(blocks(README, "python")[0])) if isinstance(node, ast.FunctionDef)}
    names |= {*STAGE_LABELS, *COMMIT_LABELS, FINISHED_BEFORE, "partition_id"} | {metric.name for metric in METRICS}
    names |= {field.name for kind in TAKEN for field in fields(kind)}
    return names | {job.name for job in defs.resolve_all_job_defs()}


TAKEN = (StageState, KeyedState, InstanceOffsets, CheckpointImport, CheckpointExport)


def test_the_page_on_monitoring_lists_every_metric() -> None:
    (section,) = (text for title, text in sections(REPOSITORY / "docs/monitoring.md", "##") if title == "Metrics")
    assert set(re.findall(r"`([a-z_]+)`", section)) >= {metric.name for metric in METRICS}


DAGSTERS = {
    "cancel_timeout_seconds",
    "default_limit",
    "free_slots_after_run_end_seconds",
    "dagster_aws",
    "dagster_checkpoints",
    "dagster_pyspark",
    "max_concurrent_runs",
    "max_runtime_seconds",
    "on_cron",
    "op_retry_policy",
    "post_processing",
    "run_monitoring",
    "run_retries",
    "since_last_handled",
    "template_vars_module",
}
"""Packages, automation conditions, and settings in dagster.yaml, which test_the_run_monitoring_that_is_shown tries."""
OF_LAUNCHERS = {
    "container_kwargs",
    "docker_executor",
    "in_process_executor",
    "job_image",
    "k8s_job_executor",
    "max_resume_run_attempts",
    "mem_limit",
    "multiprocess_executor",
    "nano_cpus",
    "run_k8s_config",
    "start_timeout_seconds",
    "stop_timeout",
}
"""Settings and executors of the packages for Kubernetes and Docker; tests/dagster/test_example_kubernetes.py looks them up."""


@pytest.mark.parametrize("page", [README, *(page for page in DOCS if page != PROTOCOL)], ids=name)
def test_every_setting_named_exists(page: Path) -> None:
    named = set(re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+)+)(?=[`=(:])", prose(page)))
    assert named - known_names() == set()


SETTINGS = {
    **TABLES["OWNERS"],
    "Stages": (Stage, dagster_checkpoints.bounded_source, dagster_checkpoints.unbounded_source, dagster_checkpoints.stage),
    "Inputs": dagster_checkpoints.StageInput,
    "Sinks": dagster_checkpoints.ParquetSink,
}


@pytest.mark.parametrize("heading", SETTINGS)
def test_the_configuration_page_explains_every_setting_and_no_other(heading: str) -> None:
    owners = SETTINGS[heading]
    expected = {name for each in (owners if isinstance(owners, tuple) else (owners,)) for name in keywords(each)}
    (section,) = (text for title, text in sections(CONFIGURATION, "##") if title == heading)
    explained = {name for row in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert explained == expected


def test_the_tables_of_settings_are_those_of_the_code() -> None:
    page = CONFIGURATION.read_text(encoding="utf-8")
    assert page == TABLES["written"](page), "Write them again: python docs/settings.py"


class Settings(KnownSettings):
    first: float = 0.5
    """Seconds of `a|b`."""
    new: int = 2**20
    """In bytes."""
    last: str | None = None
    """The
    last."""


def test_a_new_setting_gets_its_row_and_a_removed_one_loses_it() -> None:
    page = "| setting |\n|---|\n| `first` | 1 | Old. | [x](y.md) |\n\nText.\n\n| `last` | | | |\n| `gone` | 1 | Old. |  |\n"
    assert TABLES["rows"](page, Settings) == (
        "| setting |\n|---|\n| `first` | 0.5 s | Seconds of `a\\|b`. | [x](y.md) |\n| `new` | 1 MiB | In bytes. |  |\n\n"
        "Text.\n\n| `last` | `None` | The last. |  |\n"
    )


@pytest.mark.parametrize("owner", KnownSettings.__subclasses__(), ids=lambda owner: owner.__name__)
def test_dagsters_ui_describes_every_setting(owner: type[KnownSettings]) -> None:
    assert [name for name, field in owner.model_fields.items() if not field.description] == []


# Public names


def sections(page: Path, level: str) -> list[tuple[str, str]]:
    """Title and text of each part of a page below a heading of this level, up to the next one of the same or a higher level."""
    parts = re.split(rf"^(#{{1,{len(level)}}}) +(.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(title, text) for mark, title, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True) if mark == level]


def keywords(owner: Any) -> list[str]:
    """The arguments that can be given to a public name."""
    if inspect.isclass(owner) and issubclass(owner, Exception | enum.Enum):
        return [member.name for member in owner] if issubclass(owner, enum.Enum) else []
    return [
        name
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_KEYWORD)
    ]


@pytest.mark.parametrize("public", dagster_checkpoints.__all__)
def test_the_api_page_has_every_public_name_with_all_its_arguments(public: str) -> None:
    (section,) = (text for title, text in sections(API, "###") if re.findall(r"`(\w+)`", title) == [public])
    named, owner = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", section)))), getattr(dagster_checkpoints, public)
    if inspect.isclass(owner) and issubclass(owner, KnownSettings):
        assert owner in SETTINGS.values() and "(configuration.md#" in section  # that page has them all
    else:
        assert [name for name in keywords(owner) if name not in named] == []


@pytest.mark.parametrize("kind", DOCUMENTED_CLASSES)
def test_the_api_page_has_the_methods_that_a_user_calls_or_overrides(kind: type) -> None:
    shown = set(re.findall(r"`(\w+)\(", API.read_text(encoding="utf-8")))
    methods = {name for name, member in vars(kind).items() if inspect.isfunction(member) and not name.startswith("_")}
    assert methods - shown - NOT_FOR_USERS == set()


NOT_FOR_USERS = {"for_instance", "get_resource_definition", "handle", "open_store", "wait"}
"""Methods that the runtime or Dagster calls, or that other methods of the same class call for the user."""


def test_the_api_page_names_what_the_sensors_export() -> None:
    missing = [name for name in sensors.__all__ if not re.search(rf"`{name}\b", API.read_text(encoding="utf-8"))]
    assert missing == ["NotASourceError"]


# Run configurations

JOBS = {
    "flights_assets": "flights_job",
    "savepoints__flights": "flights_savepoints_job",
    "savepoints__flights_restorable": "flights_savepoint_check_job",
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_run_configurations_are_valid(page: Path) -> None:
    from definitions import defs

    for text in blocks(page, "yaml"):
        config = yaml.safe_load(text)
        if "ops" in config:
            (op,) = config["ops"]
            dg.validate_run_config(defs.resolve_job_def(JOBS[op]), config)


def test_the_run_monitoring_that_is_shown(tmp_path: Path) -> None:
    (text,) = (text for text in blocks(REPOSITORY / "docs/sensors.md", "yaml") if "run_monitoring" in text)
    settings = yaml.safe_load(text)["run_monitoring"] | {"cancel_timeout_seconds": 180}
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump({"run_monitoring": settings, "run_retries": {"enabled": False}}))
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_cancel_timeout_seconds == 180  # the default in operations.md


# Python


@contextmanager
def owner(root: Path) -> Iterator[list[ControlRequest]]:
    """An owner of the pipeline `flights` that answers all requests; yields the requests."""
    seen: list[ControlRequest] = []
    over = threading.Event()
    with CheckpointStorage(open_store(str(root)), "flights") as owned:
        ownership = owned.acquire(Owner(run_id="docs", host="here", pid=1))
        ownership.begin_job(resume=False)
        box = RequestBox(owned.store, owned.layout)

        def serve() -> None:
            while not over.wait(0.02):
                for request in box.open_requests(ownership.epoch):
                    seen.append(request)
                    at = f"savepoints/savepoint-7-{request.name}"
                    box.answer(
                        Answer(
                            request_id=request.request_id,
                            status="done",
                            answered_at=datetime.now(UTC),
                            checkpoint_id=7,
                            location=at,
                            url=owned.url_of(at),
                        )
                    )

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join(30)
            ownership.release("CANCELED")


def run_page(page: Path, **names: Any) -> dict[str, Any]:
    """Run all Python blocks of a page, one after the other, as one module."""
    namespace: dict[str, Any] = {"__name__": "page", **names}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{name(page)}, block {number + 1}", "exec"), namespace)
    return namespace


def test_pages_with_python_are_run() -> None:
    assert {page for page in PAGES if blocks(page, "python")} <= {
        *RUNS_THESE,
        *STEPS,
        *RECIPES,
    }  # the last two: in files beside this
    folders = [REPOSITORY / "tests/sinks", REPOSITORY / "tests/sources"]
    tests = [file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py")]
    assert [name(page) for page in (*SINKS, *SOURCES) if not any(f'"{name(page)}"' in text for text in tests)] == []


def test_python_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dg.Definitions.validate_loadable(run_page(README)["defs"])


def test_python_in_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from assets.flights import flights

    monkeypatch.setitem(os.environ, "CHECKPOINT_STORAGE", str(tmp_path))
    with owner(tmp_path) as seen:
        page = run_page(REPOSITORY / "docs/operations.md", flights=flights)
        assert capsys.readouterr().out.startswith("7 file://")
        assert page["suspend"](page["control"]) == "savepoints/savepoint-7-maintenance"
    assert [(request.kind, request.name, request.drain) for request in seen] == [
        ("savepoint", "before-upgrade", False),
        ("stop", "maintenance", False),
    ]
    assert page["coordinator"].savepoint_on_termination


def test_python_about_monitoring() -> None:
    from assets.flights import flights

    check, sensor = run_page(REPOSITORY / "docs/monitoring.md", flights=flights)["red_from"]
    assert (check.check_key.name, sensor.name) == ("healthy", "flights_health")


def test_python_about_assets() -> None:
    page = run_page(REPOSITORY / "docs/assets.md")
    assert [check.name for check in page["sales"].checks] == ["amounts_are_positive"]
    assert list(page["no_delay_is_missing"].check_keys) == [dg.AssetCheckKey(dg.AssetKey("hourly_delays"), "no_delay_is_missing")]
    translated = page["ShopTranslator"]().get_asset_spec(page["sales"])
    assert translated.owners == ["team:shop"] and translated.freshness_policy is not None


def test_python_about_state() -> None:
    page = run_page(REPOSITORY / "docs/state.md")
    assert callable(page["largest_groups"]) and callable(page["from_earlier_offsets"])  # tests/spark call both


def test_python_about_clusters() -> None:
    page = run_page(REPOSITORY / "docs/cluster.md")
    assert [str(parse_work_directory(page[name].work_directory)) for name in ("with_hdfs", "with_s3")] == [
        "hdfs://namenode:8020/dagster-work",
        "s3a://work/dagster",
    ]


def test_python_about_sensors() -> None:
    from assets.flights import flights
    from assets.flights_assets import flights_assets

    flights_savepoints = savepoint_asset(pipeline=flights, assets=flights_assets)
    page = run_page(
        REPOSITORY / "docs/sensors.md", flights=flights, flights_assets=flights_assets, flights_savepoints=flights_savepoints
    )
    made = [value for value in page.values() if isinstance(value, dg.SensorDefinition)]
    for one in (page["defs"], page["own"], page["bursts"]):
        dg.Definitions.validate_loadable(one)
    dg.Definitions.validate_loadable(
        dg.Definitions(
            assets=[flights_assets, flights_savepoints],
            asset_checks=[page["restorable"]],
            jobs=[page["flights_job"]],
            sensors=made,
            schedules=[page["hourly"]],
            resources={"checkpoint_coordinator": CheckpointCoordinatorResource(storage="unused")},
        )
    )
    assert {sensor.name for sensor in made} == {
        "flights_night",
        "flights_drain",
        "flights_evening",
        "flights_end_flights_live_EWR",
        "flights_patient_recovery",
        "flights_recovery",
        "flights_savepoint_check",
    }
    # The conditions in the table, verbatim.
    table = (REPOSITORY / "docs/sensors.md").read_text(encoding="utf-8").split("| condition |")[1].split("\n\n")[0]
    shown = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(shown) == 6
    for condition in shown:
        assert isinstance(eval(condition, {**page, "function": page["after_ten"]}), sensors.DrainCondition)


def test_the_command_line_and_the_pages_agree_on_exit_codes() -> None:
    from dagster_checkpoints.cli.exits import MEANINGS

    meanings = {str(int(code)): meaning for code, meaning in MEANINGS.items()}
    table = (REPOSITORY / "docs/failures.md").read_text(encoding="utf-8").split("| exit code |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|", table, re.MULTILINE)
    assert len(rows) == 3
    for meaning, code in rows:
        assert meanings[code].startswith(meaning), (meaning, meanings[code])


def test_each_command_and_exit_code_is_on_the_page_of_the_command_line() -> None:
    from dagster_checkpoints.cli.app import app
    from dagster_checkpoints.cli.exits import MEANINGS

    page = (REPOSITORY / "docs/command-line.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^(?:\| |### )?`([a-z-]+)|dagster-checkpoints ([a-z-]+)", page, re.MULTILINE))
    commands = set(app.list_commands(None))  # type: ignore[arg-type]
    assert commands - {name for names in shown for name in names} == set()
    codes = dict(re.findall(r"^\| (\d+) \| (.+) \|$", page.partition("## Exit codes")[2], re.MULTILINE))
    assert codes == {str(int(code)): meaning for code, meaning in MEANINGS.items()}


def test_the_reasons_and_problems_that_are_explained_exist() -> None:
    from dagster_checkpoints.storage.verification import ProblemKind

    page = (REPOSITORY / "docs/failures.md").read_text(encoding="utf-8")
    reasons = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", page))
    assert len(reasons) > 4
    assert reasons - {"CHECKPOINT_STORAGE"} <= {reason.name for reason in FailureReason}
    table = page.split("| problem |")[1].split("\n\n")[0]
    explained = {
        kind.strip().replace(" ", "_") for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for kind in row.split(",")
    }
    assert explained - {"---"} == set(get_args(ProblemKind)) - {"does_not_fit"}
    (listed,) = (text for text in blocks(REPOSITORY / "docs/command-line.md", "") if "missing_metadata" in text)
    assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", listed)) - {"_metadata"} == set(get_args(ProblemKind))
