"""Counts the code of the library, package by package: lines without blanks, comments and docstrings; modules; lines of imports.

Also the circles of imports between modules, those for type checking included: `python -m bench.code_count` fails if there is one.
"""

from __future__ import annotations

import ast
import graphlib
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "dagster_checkpoints"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        # Docstrings, and the texts behind attributes.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.Import | ast.ImportFrom, modules: set[str]) -> Iterator[str]:
    """The library's modules that an import names: of `from package import name`, the module `name` if there is one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
        return
    for alias in node.names:
        whole = f"{node.module}.{alias.name}"
        if whole in modules:
            yield whole
        elif node.module in modules:
            yield node.module


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Circles of imports; when one is found, one of its imports is left out and the search goes on."""
    found: list[list[str]] = []
    graph = {name: set(targets) for name, targets in graph.items()}
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
            return found
        except graphlib.CycleError as error:
            circle: list[str] = error.args[1]
            found.append(circle)
            graph[circle[1]].discard(circle[0])


def lines_below(folder: Path) -> tuple[int, int]:
    """The numbers of code lines and of modules in a folder."""
    texts = [path.read_text() for path in folder.rglob("*.py")]
    return sum(len(code_lines(text, ast.parse(text))) for text in texts), len(texts)


def main() -> int:
    trees = {}
    lines, modules, of_imports = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted((ROOT / LIBRARY).rglob("*.py")):
        text = path.read_text()
        name = module_name(path)
        trees[name] = tree = ast.parse(text)
        parts = path.relative_to(ROOT / LIBRARY).parts
        package = parts[0] if len(parts) > 1 else "(root)"
        code = code_lines(text, tree)
        lines[package] += len(code)
        modules[package] += 1
        of_imports[package] += len(code & {n for each in imports(tree) for n in range(each.lineno, (each.end_lineno or 0) + 1)})
    names = set(trees)
    graph = {
        name: {target for node in imports(tree) for target in imported(node, names)} - {name} for name, tree in trees.items()
    }
    print(f"{'package':<14}{'code lines':>11}{'modules':>9}{'imports':>9}")
    for package in sorted(lines):
        print(f"{package:<14}{lines[package]:>11,}{modules[package]:>9,}{of_imports[package]:>9,}")
    print(f"{'sum':<14}{lines.total():>11,}{modules.total():>9,}{of_imports.total():>9,}")
    for folder in ("tests", "tests/sinks"):
        count, files = lines_below(ROOT / folder)
        print(f"{folder:<14}{count:>11,}{files:>9,}")
    found = circles(graph)
    print(f"circles of imports: {len(found)}")
    for circle in found:
        print("  " + " -> ".join(name.removeprefix(f"{LIBRARY}.") for name in reversed(circle)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
