"""The extras and their committed versions: each extra has a file, the files hold versions only, and they fit."""

import re
from pathlib import Path

import pytest

from tests.constraints import LOCKED, pins, pythons
from tests.environments import find_python, has_find_links, uv


@pytest.mark.parametrize(("extra", "python"), [(extra, python) for extra in LOCKED for python in pythons(extra)])
def test_an_extra_installs_under_its_constraints(extra: str, python: str, tmp_path: Path) -> None:
    """From wheels alone, which no machine has to build; but for one package of pure Python."""
    interpreter = find_python(python)
    if interpreter is None:
        pytest.skip(f"there is no Python {python} on this machine")
    options: list[str] = []
    variables: dict[str, str] = {}
    if extra == "gpu":
        options = ["--no-config"]
        variables = {"UV_FIND_LINKS": "", "PIP_FIND_LINKS": ""}
    elif not has_find_links():
        options = ["--torch-backend", "cpu"]

    venv = str(tmp_path / "venv")
    created = uv("venv", "--python", interpreter, venv)
    assert created.returncode == 0, created.stderr
    if extra != "environments":  # reasoning-gym needs cellpylib, which has no wheels
        options += ["--only-binary", ":all:"]
    install = ["pip", "install", "--dry-run", "--python", venv, *options]
    asked = ["-r", "pyproject.toml", "--extra", extra, "-c", f"constraints/{extra}.txt"]
    answer = uv(*install, *asked, **variables)
    said = " ".join(answer.stderr.split())  # uv breaks its lines where a terminal is narrow
    if "torch==2.13.0+cpu has no wheels with a matching Python ABI tag" in said:
        pytest.skip(f"no CPU build of torch for Python {python} is in reach")
    assert answer.returncode == 0, answer.stderr
    installed = re.findall(r"^ \+ (\S+)$", answer.stderr, re.MULTILINE)
    assert {package.removesuffix("+cpu") for package in installed} <= {
        f"{name}=={version}" for name, version in pins(extra, python).items()
    }
