"""Compares the mechanisms of docs/architecture.md with the product: prints each path that does not exist, and each module that
belongs to no mechanism and no plain room, or to more than one, and fails if there is one."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("art_client", "art_server", "art_watch", "plugins")
NO_PRODUCT = {"conftest.py", "scripts", "tests"}


def section() -> str:
    """The section "Mechanisms"."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return page.partition("\n## Mechanisms\n")[2].partition("\n## ")[0]


def paths(text: str) -> list[Path]:
    """The paths in code marks: "`a/{b,c}.py` and `d`" -> a/b.py, a/c.py, d."""
    names: list[str] = []
    for name in re.findall(r"`([^`]+)`", text):
        before, _, rest = name.partition("{")
        inside, _, after = rest.partition("}")
        names += [before + part + after for part in inside.split(",")]
    return [ROOT / name for name in names if name.partition("/")[0] in PRODUCT]


def mechanisms() -> Iterator[tuple[str, str, list[Path]]]:
    """Each mechanism with its promise and its files and folders."""
    for line in section().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0] != "mechanism" and not cells[0].startswith("---"):
            yield cells[0], cells[1], paths(cells[2])


def modules() -> Iterator[Path]:
    """The product's modules, without each `__init__.py` that has a docstring only."""
    for file in sorted(file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")):
        is_empty = file.name == "__init__.py" and len(ast.parse(file.read_text()).body) < 2
        if NO_PRODUCT.isdisjoint(file.relative_to(ROOT).parts) and not is_empty:
            yield file


def faults() -> Iterator[str]:
    named = Counter(paths(section()))
    yield from (f"{path.relative_to(ROOT)} does not exist" for path in named if not path.exists())
    for module in modules():
        num_owners = sum(named[path] for path in (module, *module.parents))
        if num_owners != 1:
            yield f"{module.relative_to(ROOT)} belongs to {num_owners} mechanisms or plain rooms"


if __name__ == "__main__":
    lines = list(faults())
    sys.exit("\n".join([*lines, "docs/architecture.md, Mechanisms: each module belongs to one"]) if lines else 0)
