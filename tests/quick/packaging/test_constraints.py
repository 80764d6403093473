"""The extras and their committed versions: each extra has a file, the files hold versions only, and they fit."""

import ast
import re
import sys
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.constraints import ALIASES, EXTRAS, LOCKED, PROJECT, PYTHONS, ROOT, constraints, pins, pythons

TRACKERS = [*PROJECT["entry-points"]["art.trackers"], *PROJECT["entry-points"]["art.tracers"]]


PACKAGES = {
    "unsloth_zoo": "unsloth-zoo",
    "huggingface_hub": "huggingface-hub",
    "pydantic_core": "pydantic",  # of which it is a part
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "ruamel": "ruamel-yaml",
}
"""Modules whose package has another name."""

OF_A_SERVER = ("cluster", "transfer")
"""Annexes that need the packages of the server."""


def test_every_extra_has_its_constraints_and_nothing_else_lies_there() -> None:
    assert {path.name for path in (ROOT / "constraints").iterdir()} == {f"{extra}.txt" for extra in LOCKED}, (
        "scripts/lock writes one file for each extra"
    )
    assert {"backend": f"{PROJECT['name']}[server]"} == ALIASES


@pytest.mark.parametrize("extra", LOCKED)
def test_constraints_hold_versions_only(extra: str) -> None:
    pin = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*( ; [a-zA-Z0-9_.'=!<>() ]+)?")
    for line in constraints(extra):
        assert pin.fullmatch(line), f"no address, path, option or local version belongs here: {line}"


@pytest.mark.parametrize(("extra", "python"), [(extra, python) for extra in LOCKED for python in pythons(extra)])
def test_constraints_satisfy_what_the_extra_asks_for(extra: str, python: str) -> None:
    versions = pins(extra, python)
    for text in [*PROJECT["dependencies"], *EXTRAS[extra]]:
        requirement = Requirement(text)
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}: {version}"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("server", ["server", "gpu"])
def test_smollm2_installs_beside_either_server(server: str, python: str) -> None:
    beside = pins(server, python)
    for name, version in pins("smollm2", python).items():
        assert beside.get(name, version) == version, name


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_installs_beside_a_server_and_the_other_trackers(tracker: str, python: str) -> None:
    own = pins(tracker, python)
    for other in ("server", *TRACKERS):
        beside = pins(other, python)
        assert {name: beside.get(name, own[name]) for name in own} == own, other


def imported(folder: str) -> Iterator[str]:
    """The packages that a folder's modules import, by the names under which they are installed."""
    for path in (ROOT / folder).rglob("*.py"):
        if "tests" in path.relative_to(ROOT).parts or path.name == "conftest.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for module in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                yield PACKAGES.get(module, module)


def declared(*extras: str) -> set[str]:
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_what_the_client_imports_is_declared() -> None:
    # inside a function of art.rewards, and in modules of art.utils, art.environments and art.finetune that say so
    of_extras = {"jsonschema", "polars", "matplotlib", "verifiers", "ruamel-yaml", "filelock"}
    of_other_environments = {"nat"}
    of_type_checkers = {"typing_extensions"}  # which contain it
    ours = {"art", "art_compat", "art_protocol", "art_trackers"}
    of_programs = (
        f"plugins/{folder.name}"
        for folder in (ROOT / "plugins").iterdir()
        if folder.is_dir() and folder.name not in OF_A_SERVER
    )
    needed = {name for folder in ("art_client", *of_programs) for name in imported(folder)} - ours
    assert needed - of_extras - of_other_environments - of_type_checkers <= declared()


def test_what_the_server_imports_is_declared() -> None:
    of_vllm = {"xgrammar"}  # in modules that only vLLM's processes import
    ours = {"art_protocol", "art_server", "art_watch", "art_cluster", "art_transfer"}
    folders = ("art_server", "art_watch", *(f"plugins/{plugin}" for plugin in OF_A_SERVER))
    needed = {name for folder in folders for name in imported(folder)} - ours - of_vllm
    assert needed <= declared("gpu", "cluster")
    # On a CPU vLLM has another name, and there is neither Unsloth nor NVIDIA's driver.
    of_cuda = {"vllm", "unsloth", "unsloth-zoo", "accelerate", "nvidia-ml-py"}
    assert needed - of_cuda <= declared("server", "cluster")
