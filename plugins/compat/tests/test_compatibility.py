"""docs/compatibility.md: its claims are those of the code, and each claim has a test. Needs neither a network nor ART."""

import ast
import asyncio
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from plugins.compat.scripts.art_surface import Release, Surface, Uses, programs, read_program
from plugins.compat.tests.surface import ENTRIES, SCRIPT, VERDICTS
from plugins.compat.tests.table import COVERED, NO_EFFECT, REFUSED
from scripts.import_graph import ROOT


def test_the_page_is_what_the_script_writes() -> None:
    assert SCRIPT.PAGE.read_text() == SCRIPT.page(), "run plugins/compat/scripts/compatibility"


def test_every_name_has_a_status() -> None:
    assert {verdict.status for verdict in VERDICTS.values()} == set(SCRIPT.STATUSES)
    assert all(entry.versions and entry.name.startswith("art") for entry in ENTRIES)
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


def test_the_surface_has_names_only() -> None:
    wrong = [entry.name for entry in ENTRIES if not re.fullmatch(r"art[\w.]*(\(\w+\))?", entry.name)]
    assert wrong == []


def test_what_arts_programs_use_resolves() -> None:
    used = SCRIPT.used_for_training(VERDICTS)
    absent = [entry.name for entry, verdict in used.items() if verdict.status == "absent"]
    assert len(used) > 300 and len(absent) <= 0.05 * len(used), absent


# --- what has a test --------------------------------------------------------------------------------------------------


def test_what_works_or_warns_is_called_by_a_test() -> None:
    """Settings have a test for all of them (plugins/compat/tests/test_compat_settings.py), import paths have one below."""
    covered, missing = SCRIPT.covered(), list[str]()
    for entry, verdict in VERDICTS.items():
        if verdict.status in ("absent", "refused") or entry.kind in ("module", "path"):
            continue
        names = {entry.name, SCRIPT.ours(entry.name)}
        if SCRIPT.of_settings(entry) is None and not names & covered.keys():
            missing.append(entry.name)
    assert missing == []


def test_the_table_has_names_of_art() -> None:
    names = {entry.name for entry in ENTRIES}
    assert SCRIPT.covered().keys() - names == set()
    assert (NO_EFFECT.keys() | REFUSED.keys()) - names == set()
    statuses = {entry.name: verdict.status for entry, verdict in VERDICTS.items()}
    assert {statuses[name] for name in NO_EFFECT} == {"warns"}
    assert {statuses[name] for name in SCRIPT.covered()} <= {"works", "warns"}


@pytest.mark.parametrize("test", COVERED, ids=lambda test: test.rpartition("/")[2])
def test_a_test_names_what_it_covers(test: str) -> None:
    text = source_of(test)
    of_test = [name for name, tests in SCRIPT.covered().items() if test in tests]
    words = {name: name.rstrip(")").replace("(", ".").rpartition(".")[2] for name in of_test}
    assert of_test and [n for n, word in words.items() if not re.search(rf"\b{word}\b", text)] == []


def source_of(test: str) -> str:
    """The source of a test, and of the functions and classes of its module that it uses."""
    file, _, name = test.partition("::")
    lines = (ROOT / file).read_text().splitlines()
    nodes = {
        node.name: node
        for node in ast.parse("\n".join(lines)).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    wanted, text = [name], ""
    for wanted_name in wanted:
        node = nodes[wanted_name]
        first = min(part.lineno for part in (node, *node.decorator_list))
        text += "\n".join(lines[first - 1 : node.end_lineno]) + "\n"
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & nodes.keys()
        wanted += sorted(used - set(wanted))
    return text


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_name_raises_a_sentence_with_our_way(name: str) -> None:
    async def wait() -> None:
        await result

    with pytest.raises((NotImplementedError, TypeError)) as caught:
        result = REFUSED[name]()
        assert inspect.isawaitable(result)
        asyncio.run(wait())
    text = str(caught.value)
    assert re.search(r"\bart\b", text) and "\n" not in text and ". " not in text, text


def test_other_import_paths_lead_to_the_same_names() -> None:
    for entry, verdict in VERDICTS.items():
        if verdict.status == "works" and entry.kind == "module":
            assert importlib.import_module(entry.name)
        elif verdict.status == "works" and entry.kind == "path":
            module, _, name = entry.name.rpartition(".")
            assert getattr(importlib.import_module(module), name) is SCRIPT.find(entry.of)


# --- how the surface is read ------------------------------------------------------------------------------------------

PACKAGE = {
    "art/__init__.py": 'from .model import Model\nfrom .tools import retry\n__all__ = ["Model", "retry"]',
    "art/model.py": """
import pydantic
class _Base(pydantic.BaseModel):
    name: str
class Model(_Base):
    _hidden: int = 0
    size: int | None = None
    def __init__(self, *, name: str, size: int | None = None, _internal_config: dict | None = None) -> None: ...
    @property
    def steps(self) -> int: ...
    async def train[T](self, groups: list[T], *, verbose: bool = False) -> None: ...
    def _private(self) -> None: ...
""",
    "art/tools.py": "type Number = int\nLIMIT = 3\nlogger = 1\ndef retry(max_attempts: int = 3, **options): ...",
    "art/unsloth/service.py": "class Service: ...",
}
PROGRAM = """
import art
from art.tools import retry as again
from art.unsloth.service import Service

model = art.Model(name="a", _internal_config={"init_args": {}})

@again(max_attempts=2)
async def main(other: art.Model):
    await model.train([], verbose=True)
    print(other.steps)
"""


@pytest.fixture
def surface(tmp_path: Path) -> Surface:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Surface({"1.0": Release(tmp_path / "art")})


def test_names_are_read_from_source(surface: Surface) -> None:
    kinds = {name: entry.kind for name, entry in surface.entries.items()}
    assert kinds == {
        **dict.fromkeys(("art", "art.model", "art.tools"), "module"),
        "art.Model": "class",
        "art.model.Model": "path",
        "art.Model.name": "field",
        "art.Model.size": "field",
        "art.Model(_internal_config)": "keyword",
        "art.Model.steps": "attribute",
        "art.Model.train": "method",
        "art.Model.train(groups)": "keyword",
        "art.Model.train(verbose)": "keyword",
        "art.retry": "function",
        "art.retry(max_attempts)": "keyword",
        "art.tools.retry": "path",
        "art.tools.LIMIT": "constant",
        "art.tools.Number": "constant",
    }
    assert surface.entries["art.model.Model"].of == "art.Model"


def test_uses_are_read_from_programs(surface: Surface, tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    (folder / "examples").mkdir(parents=True)
    (folder / "tests").mkdir()
    for name in ("examples/a.py", "examples/the_same.py", "tests/test_a.py"):
        (folder / name).write_text(PROGRAM)
    (folder / "page.md").write_text("Text.\n\n```python\nart.retry(\n    <N>,\n```\n\n```python\nmodel.size\n```\n")
    texts = dict(programs([folder]))
    assert list(texts) == ["programs/examples/a.py", "programs/page.md"]
    uses = Uses(surface)
    uses.read(read_program(texts["programs/examples/a.py"])[0])
    assert uses.names == {
        *("art", "art.tools", "art.tools.retry", "art.retry", "art.retry(max_attempts)", "art.Model"),
        *("art.Model.name", "art.Model(_internal_config)", "art.Model.train", "art.Model.steps"),
        "art.Model.train(verbose)",
    }
    assert uses.internals == {"art.unsloth.service", "art.unsloth.service.Service"}
    trees, num_unread = read_program(texts["programs/page.md"])
    assert num_unread == 1 and len(trees) == 2, "the import, and the second block"
    assert Counter(entry.kind for entry in surface.entries.values())["module"] == 3
