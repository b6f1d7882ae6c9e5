"""The tutorial is walked through from its first page to its last, command by command, and each output shown is what comes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from resources.embedded_s3 import EmbeddedS3

REPOSITORY = Path(__file__).resolve().parents[3]
TUTORIAL = REPOSITORY / "docs/tutorial"
PAGES = sorted(TUTORIAL.glob("*.md"))
END = "=== end of block ==="


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_python_that_is_shown_is_in_a_file_that_the_page_links() -> None:
    files: list[Path] = []
    for page in PAGES:
        files += [TUTORIAL / name for name in re.findall(r"\]\((\w+\.py)\)", page.read_text(encoding="utf-8"))]
        for language, text in blocks(page):
            if language == "python":
                assert any(text.strip("\n") in file.read_text(encoding="utf-8") for file in files), f"{page.name}: {text}"
    assert set(files) == set(TUTORIAL.glob("*.py"))


def test_every_step_in_its_order(tmp_path: Path) -> None:
    for file in TUTORIAL.glob("*.py"):
        shutil.copy(file, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("CHECKPOINT_STORAGE", "DAGSTER_HOME")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    expected: list[tuple[str, str]] = []
    script = []
    for page in PAGES:
        shown = blocks(page)
        for (language, text), (following, output) in zip(shown, [*shown[1:], ("", "")], strict=False):
            if language == "shell":
                script += [text.replace("dagster dev", "dagster definitions validate"), f'echo "{END}"']
                expected.append((f"{page.name}:\n{text}", output if following == "text" else "…"))
    with EmbeddedS3(bucket="my-bucket") as s3:
        walked = subprocess.run(
            ["timeout", "900", "bash", "-ec", "\n".join(script)],
            cwd=tmp_path,
            env=environment | s3.environment,
            capture_output=True,
            text=True,
            check=False,
        )
    found = walked.stdout.split(f"{END}\n")
    logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(tmp_path.rglob("*.log")))
    assert walked.returncode == 0 and len(found) == len(expected) + 1, f"{walked.stdout}\n{walked.stderr[-2000:]}\n{logs}"
    others = [
        f"{where}expected:\n{output}\nfound:\n{came}"
        for (where, output), came in zip(expected, found, strict=False)
        if not re.fullmatch(".*".join(map(re.escape, squeezed(output).split("…"))), squeezed(came), re.DOTALL)
    ]
    assert others == [], "\n".join(others)


def squeezed(text: str) -> str:
    """The text without the widths of columns."""
    return re.sub(r" +", " ", re.sub(r" *\n", "\n", text)).strip()
