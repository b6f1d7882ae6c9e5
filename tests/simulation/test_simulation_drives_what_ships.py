"""The role of each simulator module, and the shipped code that it drives: measured in running worlds, not read from imports."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType

import simulation
from simulation import violations
from simulation.running import run
from simulation.scenario import random_scenario

FOLDER = Path(simulation.__file__).parent
SHIPPED = FOLDER.parent / "dagster_checkpoints"

DRIVERS = {
    "machine": {"execution/acquisition.py", "execution/ownership.py", "execution/shared_files.py", "storage/shared_files.py"},
    "operators": {"state/rescaled_instances.py"},
    "process": {
        "coordination/coordinator.py",
        "execution/job_machine.py",
        "execution/job_requests.py",
        "execution/start_point.py",
    },
    "requests": {
        "execution/acquisition.py",
        "execution/checkpoint_deletion.py",
        "execution/checkpoint_writing.py",
        "execution/ownership.py",
        "storage/shared_files.py",
    },
    "restoring": {
        "execution/input_channel.py",
        "state/metadata_file.py",
        "state/recording.py",
        "state/rescaled_instances.py",
        "state/restore.py",
        "state/stage_names.py",
    },
    "sinks": {"sinks/engine.py", "sinks/ledger.py", "sinks/transactions.py"},
    "fused_task": {"execution/task_machine.py", "execution/fused_sources.py"},
    "task": {"execution/task_machine.py", "execution/event_time.py"},
    "task_data": {"execution/task_machine.py", "execution/event_time.py", "execution/input_channel.py"},
    "writing": {"execution/shared_files.py", "execution/storage_steps.py", "storage/shared_files.py"},
}
"""The drivers, and the shipped code that each of them calls in every search."""
WORLD = {
    "channels": "records and their arithmetic, the queues of the data plane, the snapshots of tasks",
    "consistency": "the expected rows of a pipeline, and an invariant: a checkpoint is a consistent cut",
    "divisions": "the snapshots and tallies of chains that a restore divides or joins",
    "rescalings": "the snapshots and tallies of tasks that a restore gives other instances; tasks as shipped metadata",
    "shapes": "random pipelines, with the shipped graph, chains and channels",
    "storage": "durable storage, and its invariants",
    "violations": "the list of invariants, and where they are checked",
    "world": "time, users, faults and all possible steps",
}
SEARCH = {
    "__init__": "",
    "__main__": "the command line",
    "faults": "deliberate faults of shipped code, as replaced text",
    "burst_faults": "those of runs that read what is there, and suspend",
    "layout_faults": "those of a restore that divides chains",
    "liveness_faults": "those after which something waits for ever",
    "injection": "how a fault gets into the code",
    "plan_faults": "those of the plan of an attempt",
    "rescaling_faults": "those of a restore with other instances",
    "running": "one world from beginning to end, and the fewest steps to a violation",
    "sink_faults": "those of a sink's life",
    "sink_histories": "the sink of one instance alone, in histories of restores, take-overs and new jobs",
    "scenario": "the values that a seed determines",
    "schedules": "the choice of the next step",
    "search": "many worlds",
}
RULES = ("coordination", "execution")
RESTORES = {
    "rescaled_checkpoint",
    "rescaled_instances",
    "rescaled_channels",
    "stage_changes",
    "divided_chains",
    "stage_names",
    "inputs",
}
"""The modules of `state` that say what a restore makes of a checkpoint of another version of the pipeline."""


def calls(worlds: int) -> dict[str, set[str]]:
    """By module of the simulator, the files of the plugin that it calls while worlds run; `*` for all files called."""
    found: dict[str, set[str]] = defaultdict(set)
    ours, shipped = f"{FOLDER}/", f"{SHIPPED}/"

    def called(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(shipped) and frame.f_code.co_name != "<module>":
            found["*"].add(file[len(shipped) :])
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            if caller.startswith(ours):
                found[Path(caller).stem].add(file[len(shipped) :])

    sys.setprofile(called)
    try:
        for seed in range(worlds):
            run(random_scenario(seed), record=False)
    finally:
        sys.setprofile(None)
    return found


def test_every_module_of_the_simulator_is_listed() -> None:
    assert {*DRIVERS, *WORLD, *SEARCH} == {path.stem for path in FOLDER.glob("*.py")}
    assert len(DRIVERS) + len(WORLD) + len(SEARCH) == len({*DRIVERS, *WORLD, *SEARCH})


def test_drivers_call_the_shipped_rules_and_every_rule_is_driven() -> None:
    found = calls(worlds=200)
    assert {module: missed for module, wanted in DRIVERS.items() if (missed := wanted - found[module])} == {}
    rules = {f"{floor}/{path.relative_to(SHIPPED / floor)}" for floor in RULES for path in (SHIPPED / floor).rglob("*.py")}
    with_code = {rule for rule in rules if any(functions(SHIPPED / rule))}
    # The first records and replays machines. Which sources are silent is reported; limits decide how much a micro-batch reads;
    # offsets of a consumer group are never read back. No step of the protocol depends on them.
    not_of_a_run = {
        "execution/trace.py",
        "execution/source_answers.py",
        "execution/source_limits.py",
        "execution/offset_commits.py",
    }
    never_called = sorted(with_code - found["*"] - not_of_a_run)
    assert never_called == ["coordination/errors.py"] or never_called == []
    assert {f"state/{name}.py" for name in RESTORES} <= found["*"]


def test_no_function_of_the_simulator_duplicates_a_shipped_one() -> None:
    """Compared by their statements; names of variables do not matter."""
    shipped = {shape(node): f"{path.name}:{node.name}" for path in SHIPPED.rglob("*.py") for node in functions(path)}
    again = {f"{path.name}:{node.name}": shipped[shape(node)] for path in FOLDER.glob("*.py") for node in functions(path)
             if shape(node) in shipped}  # fmt: skip
    assert again == {}


def test_the_list_of_invariants_names_existing_code() -> None:
    nodes = [node for path in FOLDER.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    known = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)} | {
        p.stem for p in FOLDER.glob("*.py")
    }
    named = {part for name in re.findall(r"`([\w.]+)`", violations.__doc__ or "") for part in name.split(".")}
    assert len(named) > 20 and named - known == set()


def functions(path: Path) -> list[ast.FunctionDef]:
    """The functions of more than two statements."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return [node for node in found if sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) > 3]


def shape(node: ast.FunctionDef) -> str:
    """The function without its name, docstring and variables' names."""
    names: dict[str, str] = {}

    class Renamed(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.Name:
            return ast.Name(names.setdefault(name.id, f"v{len(names)}"), name.ctx)

    body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    module = ast.Module([Renamed().visit(ast.parse(ast.unparse(statement)).body[0]) for statement in body], [])
    return ast.dump(module)
