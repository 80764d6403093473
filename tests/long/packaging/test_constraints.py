"""The extras and their committed versions: each extra has a file, the files hold versions only, and they fit."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.constraints import LOCKED, PYTHONS, ROOT, pins


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
    created = uv("venv", "--python", interpreter, venv)
    assert created.returncode == 0, created.stderr
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
