"""The client with other versions of its packages than the tests' own: the lowest that pyproject.toml allows, and each major version of
`openai` (some frameworks hold 2.54). The environment has the built package and these versions; what else the tests need comes from
the tests' environment."""

import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments import ROOT, find_python, uv

VERSIONS = {
    "lowest": (["--resolution", "lowest-direct", ".[view]"], ["tests/quick/client"]),
    "openai 2": ([".", "openai==2.54.0"], ["tests/quick/client"]),
    "openai 3": ([".", "openai>=3,<4"], ["tests/quick/client"]),
    "newest page": ([".[view]"], ["tests/quick/watch/test_view.py"]),
}
"""The requirements and the tests that must pass with them."""


@pytest.fixture
def environment() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "venv")


@pytest.mark.parametrize("name", VERSIONS)
def test_the_client_works_with_these_versions(name: str, environment: Path) -> None:
    requirements, tests = VERSIONS[name]
    subprocess.run([find_python("3.11") or "python3", "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    installed = uv("pip", "install", "--python", python, *requirements)
    assert installed.returncode == 0, installed.stderr
    (packages,) = (environment / "lib").glob("python*/site-packages")
    # Searched after the packages of this environment. Python reads no .pth files there, which would add the repository.
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
    run = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-4000:]
