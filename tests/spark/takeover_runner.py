"""A plain query, taken over in a process of its own: a session gets its jars at its start, and a Python has one version of Spark.

    python takeover_runner.py <folder> <settings as JSON>

Settings: `killed`, the names of programs whose queries were killed in the folder, and `spark_version`, the version of Spark that
ran them. Or, for a query over remote files that is given back, too: `program`, `how` (one of `takeovers.CUTS`), `root`, a URL.
In both cases `spark`, settings of the session. The exit code is 0 if each row is in the outputs once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dagster_checkpoints.spark.session.spark_session import build_session
from tests.spark.conftest import Lab
from tests.spark.plain_programs import PROGRAMS
from tests.spark.processes.test_killed_plain_queries import check_taken
from tests.spark.takeovers import FileOutput, RemoteFiles, Takeover, check_there_and_back


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    folder.mkdir(exist_ok=True)
    own = {"spark.master": "local[2]", "spark.driver.memory": "1g", "spark.sql.shuffle.partitions": 2}
    lab = Lab(build_session({**own, **settings.get("spark", {})}), folder)
    try:
        if "killed" in settings:
            check_taken(lab, settings["killed"], settings["spark_version"])
        else:
            check_both_ways(lab, settings["program"], settings["how"], settings["root"])
    finally:
        lab.close()
        lab.spark.stop()


def check_both_ways(lab: Lab, program: str, how: str, root: str, **settings: Any) -> None:
    chosen = PROGRAMS[program]
    inputs = {name: RemoteFiles(lab, name, f"{root}/{name}") for name in chosen.streams}
    output = FileOutput(lab, f"{root}/output")
    check_there_and_back(Takeover(lab, chosen, inputs), how, output, f"{root}/checkpoint")


if __name__ == "__main__":
    main()
