"""The extras and their committed versions: each extra has a file, the files hold versions only, and they fit."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from art_trackers import TrackerName

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
ALIASES = {
    extra: requirements[0]
    for extra, requirements in EXTRAS.items()
    if len(requirements) == 1 and requirements[0].startswith(PROJECT["name"])
}
LOCKED = sorted(set(EXTRAS) - set(ALIASES))
PYTHONS = ("3.11", "3.12", "3.13")
PACKAGES = {
    "unsloth_zoo": "unsloth-zoo",
    "huggingface_hub": "huggingface-hub",
    "pydantic_core": "pydantic",  # of which it is a part
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
}
"""Modules whose package has another name."""


def constraints(extra: str) -> list[str]:
    return (ROOT / "constraints" / f"{extra}.txt").read_text().splitlines()


def pins(extra: str, python: str, machine: str = "x86_64") -> dict[str, str]:
    """The version of each package on Linux under a Python."""
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found: dict[str, str] = {}
    for line in constraints(extra):
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        (specifier,) = requirement.specifier
        assert requirement.name not in found, f"{extra}: two versions of {requirement.name}"
        found[requirement.name] = specifier.version
    return found


def test_every_extra_has_its_constraints_and_nothing_else_lies_there() -> None:
    assert {path.name for path in (ROOT / "constraints").iterdir()} == {
        f"{extra}.txt" for extra in LOCKED
    }, "scripts/lock writes one file for each extra"
    assert {"backend": f"{PROJECT['name']}[server]"} == ALIASES


@pytest.mark.parametrize("extra", LOCKED)
def test_constraints_hold_versions_only(extra: str) -> None:
    pin = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*( ; [a-zA-Z0-9_.'=!<>() ]+)?")
    for line in constraints(extra):
        assert pin.fullmatch(line), (
            f"no address, path, option or local version belongs here: {line}"
        )


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", LOCKED)
def test_constraints_satisfy_what_the_extra_asks_for(extra: str, python: str) -> None:
    found = pins(extra, python)
    for text in [*PROJECT["dependencies"], *EXTRAS[extra]]:
        requirement = Requirement(text)
        version = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}: {version}"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("server", ["server", "gpu"])
def test_smollm2_installs_beside_either_server(server: str, python: str) -> None:
    beside = pins(server, python)
    for name, version in pins("smollm2", python).items():
        assert beside.get(name, version) == version, name


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("tracker", get_args(TrackerName))
def test_a_tracker_installs_beside_a_server_and_the_other_trackers(
    tracker: str, python: str
) -> None:
    own = pins(tracker, python)
    for other in ("server", *get_args(TrackerName)):
        beside = pins(other, python)
        assert {name: beside.get(name, own[name]) for name in own} == own, other


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", LOCKED)
def test_an_extra_installs_under_its_constraints(extra: str, python: str, tmp_path: Path) -> None:
    """From wheels alone, which no machine has to build; but for one package of pure Python."""
    interpreter = find_python(python)
    if interpreter is None:
        pytest.skip(f"there is no Python {python} on this machine")
    environment = dict(os.environ)
    options: list[str] = []
    if extra == "gpu":
        options = ["--no-config"]
        environment |= {"UV_FIND_LINKS": "", "PIP_FIND_LINKS": ""}
    elif not {"UV_FIND_LINKS", "PIP_FIND_LINKS"} & set(environment):
        options = ["--torch-backend", "cpu"]

    def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "scripts" / "uv", *arguments],
            cwd=ROOT,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
        )

    venv = str(tmp_path / "venv")
    made = uv("venv", "--python", interpreter, venv)
    assert made.returncode == 0, made.stderr
    if extra != "environments":  # reasoning-gym needs cellpylib, which has no wheels
        options += ["--only-binary", ":all:"]
    install = ["pip", "install", "--dry-run", "--python", venv, *options]
    asked = ["-r", "pyproject.toml", "--extra", extra, "-c", f"constraints/{extra}.txt"]
    answer = uv(*install, *asked)
    said = " ".join(answer.stderr.split())  # uv breaks its lines where a terminal is narrow
    if "torch==2.13.0+cpu has no wheels with a matching Python ABI tag" in said:
        pytest.skip(f"no CPU build of torch for Python {python} is in reach")
    assert answer.returncode == 0, answer.stderr
    installed = re.findall(r"^ \+ (\S+)$", answer.stderr, re.MULTILINE)
    assert {package.removesuffix("+cpu") for package in installed} <= {
        f"{name}=={version}" for name, version in pins(extra, python).items()
    }


def find_python(version: str) -> str | None:
    """An interpreter of that version that runs, pyenv's among them."""
    candidates = [f"python{version}"]
    if root := os.environ.get("PYENV_ROOT"):
        candidates += map(str, Path(root).glob(f"versions/{version}.*/bin/python"))
    for candidate in candidates:
        path = shutil.which(candidate)
        if path and not subprocess.run([path, "-V"], capture_output=True, check=False).returncode:
            return path
    return None


def imported(folder: str) -> Iterator[str]:
    """The packages that a folder's modules import, by the names under which they are installed."""
    for path in (ROOT / folder).rglob("*.py"):
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
    # inside a function of art.rewards, and in modules of art.utils and art.environments that say so
    of_extras = {"jsonschema", "polars", "matplotlib", "verifiers"}
    of_type_checkers = {"typing_extensions"}  # which contain it
    needed = set(imported("art_client")) - {"art", "art_protocol", "art_trackers"}
    assert needed - of_extras - of_type_checkers <= declared()


def test_what_the_server_imports_is_declared() -> None:
    of_vllm = {"xgrammar"}  # in modules that only vLLM's processes import
    needed = (
        set(imported("art_server"))
        - {"art", "art_protocol", "art_trackers", "art_server"}
        - of_vllm
    )
    assert needed <= declared("gpu")
    # On a CPU vLLM has another name, and there is neither Unsloth nor NVIDIA's driver.
    of_cuda = {"vllm", "unsloth", "unsloth-zoo", "accelerate", "nvidia-ml-py"}
    assert needed - of_cuda <= declared("server")
