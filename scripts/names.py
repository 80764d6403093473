"""Refuses the names each, found, made, given and place, which say nothing of a value: prints FILE:LINE and the name of
each variable, parameter, field, function or class with such a name, and fails if there is one."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFUSED = {"each", "found", "made", "given", "place"}
EXCEPTIONS = {
    ("art_client/art_protocol/wire.py", "found"): "a field of the public `Difference`, also in stored reports"
}
"""Public and stored names by file, with the reason."""
NAME = rf"_*(?:{'|'.join(REFUSED)})"
CANDIDATE = re.compile(rf"\b(?:as|def|class)\s+{NAME}\b|\bfor\b[^\n]*\b{NAME}\s+in\b|\b{NAME}\s*(?:[=:,)\]]|[^\w\s]+=)")
"""A text that can bind a refused name. Files without such a text are not parsed: all files would take three seconds."""


def bindings(text: str) -> Iterator[tuple[int, str]]:
    """The line and the name of each binding of a refused name."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.alias(asname=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.ExceptHandler(name=name)
                | ast.MatchAs(name=name)
                | ast.MatchStar(name=name)
            ) if name and name.lstrip("_") in REFUSED:
                yield node.lineno, name


def python_files() -> Iterator[tuple[str, str]]:
    """The name and the text of each tracked file of Python, also of scripts without an ending."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for file in tracked.splitlines():
        if Path(file).suffix in ("", ".py") and (ROOT / file).is_file():
            text = (ROOT / file).read_text()
            if file.endswith(".py") or re.match("#!.*python", text):
                yield file, text


def main() -> None:
    candidates = [(file, text) for file, text in python_files() if CANDIDATE.search(text)]
    refused = [(file, line, name) for file, text in candidates for line, name in bindings(text)]
    lines = [f"{file}:{line}: {name}" for file, line, name in refused if (file, name) not in EXCEPTIONS]
    sys.exit("\n".join([*lines, "scripts/names.py: name these after their values"]) if lines else 0)


if __name__ == "__main__":
    main()
