"""The contract of imports: floors, rooms by process, nothing in circles, and a client without a server's packages."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import art
from scripts.import_graph import (
    ANNEXES,
    NEEDED,
    ROOT,
    circles,
    foreign_packages,
    import_graph,
    imported_names,
    modules,
    names_of_art,
    our_packages,
    picture,
    reach,
    room,
)

FLOORS = [
    {"__main__"},
    {"cluster", "transfer", "art_watch/terminal"},
    {"cli"},
    {"app"},
    {"art_watch"},
    {"api/openai"},
    {"api"},
    {"server"},
    {"inference_proxy", "status"},
    {"learning"},
    {"models"},
    {"machines"},
    {"jobs"},
    {"ledger"},
    {"engine"},
    {"engine/device"},
    {"engine/inspection_process"},
    {"trainer", "engine/vllm_process"},
    {"process", "flags"},
    {"store"},
    {"settings", "errors", "parser"},
    {"compat", "environments", "finetune", "harbor", "rewards", "skypilot", "trackers"},
    {"art", "art_server"},
    {"shared"},
    {"art_protocol"},
]
"""From the roof down: a room imports what lies below it."""
OTHER_PROCESSES = {"engine/inspection_process", "trainer", "engine/vllm_process"}
COMMANDS = {"art_transfer.export"}
"""Of `art export`: it runs in a process of its own, and loads the trainer's code when it needs it."""
OF_A_SERVER = {"cluster", "transfer"}
"""Annexes that need the packages of the server."""
EXTRAS = {"pydantic_core", "sky", "polars", "matplotlib", "verifiers", "ruamel", "filelock", "nat", "ray"}
"""A part of pydantic, and what comes with the extras `sky`, `plotting`, `finetune`, `verifiers` and `cluster`; NVIDIA's toolkit."""
BUILT_IN = {"typing_extensions"}
"""For type checkers only, which contain it."""


def test_nothing_imports_in_a_circle() -> None:
    assert circles(import_graph()) == []


def test_imports_point_down() -> None:
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    for module, imports in import_graph().items():
        for imported in imports:
            if room(module) != room(imported):
                assert floor[room(module)] < floor[room(imported)], f"{module} imports {imported}"


def test_no_module_imports_an_annex() -> None:
    for module, imports in import_graph().items():
        assert not {room(imported) for imported in imports} & ANNEXES.keys() - {room(module)}, module


def test_an_annex_uses_names_of_the_client_and_of_annexes_that_it_needs() -> None:
    for module, file in modules().items():
        annex = room(module)
        for name in names_of_art(file) if annex in ANNEXES else ():
            assert owner(name) in {"art", annex, *NEEDED.get(annex, ())}, f"{module}: art.{name}"


def owner(name: str) -> str | None:
    """The room that has a name of `art`. The names of `__all__` are the client's."""
    if name in art.__all__:
        return "art"
    module = art._MODULE_BY_NAME.get(name, f"art.{name}")
    return room(module) if module in modules() else None


def test_a_use_of_another_annex_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import art\nfrom art import metrics\nart.rewards.exact_match\nart.trajectory(art.Trajectory())\n")
    assert names_of_art(file) == {"metrics", "rewards", "trajectory", "Trajectory"}
    owners = {name: owner(name) for name in (*names_of_art(file), "Trajectroy")}
    assert owners == {
        **dict.fromkeys(("metrics", "trajectory"), "compat"),
        "rewards": "rewards",
        "Trajectory": "art",
        "Trajectroy": None,
    }


def test_each_entry_point_names_what_there_is() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group in ("art.trackers", "art.tracers"):
        installed = {entry_point.name: entry_point for entry_point in entry_points(group=group)}
        assert {name: entry_point.value for name, entry_point in installed.items()} == groups[group], (
            "run scripts/setup"
        )
        assert all(entry_point.load() is not None for entry_point in installed.values())


def test_the_server_imports_nothing_that_runs_in_other_processes() -> None:
    for module, imports in import_graph().items():
        if room(module) not in OTHER_PROCESSES and module not in COMMANDS:
            assert not {room(imported) for imported in imports} & OTHER_PROCESSES, module


def test_the_server_loads_no_torch_and_nothing_of_the_client() -> None:
    loaded = loaded_by("art_server.app, art_server.cli, art_server.jobs.trainer")
    assert not {"torch", "torchvision", "vllm", "transformers", "art"} & loaded


def test_a_rank_tells_what_it_computes_with_before_the_slow_imports() -> None:
    assert not {"transformers", "peft"} & loaded_by("art_server.trainer.worker")


@pytest.mark.parametrize("module", ["art_server.trainer.tasks", "art_server.engine.vllm_process.child"])
def test_the_servers_processes_import_nothing_of_the_client(module: str) -> None:
    assert "art" not in {room(reached) for reached in reach(import_graph(), module)}


def test_the_protocol_needs_pydantic_only() -> None:
    for module, file in modules().items():
        if room(module) == "art_protocol":
            assert foreign_packages(file) <= {"pydantic"}, module
            assert {room(imported) for imported in import_graph()[module]} <= {"art_protocol"}, module
    every = ", ".join(name for name in modules() if room(name) == "art_protocol")
    assert not {"art", "httpx", "openai"} & loaded_by(every)


def loaded_by(imported: str) -> set[str]:
    """The packages that a process has after importing modules."""
    code = f"import json, sys, {imported}; print(json.dumps([*{{n.partition('.')[0] for n in sys.modules}}]))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(ran.stdout))


def test_the_client_imports_what_it_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=\[; ]", requirement)[0] for requirement in project["dependencies"]}
    for module, file in modules().items():
        if room(module) in {"art", *ANNEXES} - OF_A_SERVER:
            assert foreign_packages(file) <= declared | EXTRAS | BUILT_IN, module


def test_no_test_imports_from_a_test() -> None:
    """Fixtures stand in conftest files, helpers in modules whose name says what they make."""
    of_a_test = re.compile(r"^\s*(from|import) (tests|plugins)\.(\S+ import )?.*\btest_", re.MULTILINE)
    for file in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]:
        assert not of_a_test.search(file.read_text()), file


def is_python(file: Path) -> bool:
    with open(file, "rb") as script:
        first = script.readline()
    return file.suffix == ".py" or re.match(rb"#!/usr/bin/env (-S \.venv/bin/)?python", first) is not None


SCRIPTS = [
    file
    for folder in (ROOT / "scripts", *(annex / "scripts" for annex in ANNEXES.values()))
    for file in folder.rglob("*")
    if file.is_file() and is_python(file)
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_scripts_import_what_there_is(script: Path) -> None:
    for name in imported_names(script):
        if name.partition(".")[0] not in our_packages() or name in modules():
            continue
        module, _, member = name.rpartition(".")
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            assert error.name in ("unsloth", "verifiers"), name
            continue
        assert hasattr(loaded, member), name


def test_the_page_shows_the_picture_of_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert picture() in page, "run scripts/pages"
