"""What is built installs in an empty environment and starts; the lines of README.md and docs/howto/install.md work as they stand.

Where a machine has find-links in place of an index of torch's CPU builds, `--torch-backend cpu` and the index are left out.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.constraints import CLIENT_PYTHONS
from tests.environments import ROOT, find_python, has_find_links, uv
from tests.live import Server

INSTALL_PAGE = ROOT / "docs" / "howto" / "install.md"
CLIENT = "import art; print(art.TrainableModel(name='a', project='p', base_model='art/tiny').name)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture
def environment() -> Iterator[Path]:
    """An empty folder for an environment of gigabytes, which pytest would keep."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "venv")


def make_environment(folder: Path, version: str) -> Path:
    """The folder of the programs of an empty environment with pip."""
    interpreter = find_python(version)
    if interpreter is None:
        pytest.skip(f"there is no Python {version} on this machine")
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    return folder / "bin"


@pytest.mark.parametrize("version", CLIENT_PYTHONS)
@pytest.mark.parametrize(("kind", "installer"), [("wheel", "uv"), ("wheel", "pip"), ("sdist", "uv")])
def test_the_client_installs_and_runs(
    kind: str, installer: str, version: str, built: dict[str, Path], environment: Path, tmp_path: Path
) -> None:
    programs = make_environment(environment, version)
    if installer == "uv":
        done = uv("pip", "install", "--python", programs / "python", built[kind])
    else:
        install = [programs / "python", "-m", "pip", "install", built[kind]]
        done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for command in ([programs / "python", "-W", "error", "-c", CLIENT], [programs / "art", "--help"]):
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0 and ran.stdout, ran.stderr


def line_of(page: Path, beginning: str) -> str:
    lines = re.findall(rf"^{beginning} [^#\n]*", page.read_text(), re.MULTILINE)
    (line,) = (line for line in lines if "constraints/server.txt" in line)
    return line


@dataclass
class Installed(Server):
    """A server of another environment."""

    programs: Path = Path()

    def command(self) -> list[str]:
        return [str(self.programs / "art-server")]


def check_server(programs: Path, folder: Path) -> None:
    """art/tiny is served, and a user's own programs import what the server brings."""
    server = Installed(folder, programs=programs, arguments=["--base-model", "art/tiny"])
    with server.running(), server.client() as client:
        body = {"model": "art/tiny", "messages": [{"role": "user", "content": "yes or no?"}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"], answer.text


@pytest.mark.parametrize(
    ("page", "beginning"),
    [(ROOT / "README.md", "uv pip install"), (INSTALL_PAGE, "uv pip install"), (INSTALL_PAGE, "pip install")],
    ids=["README, uv", "install.md, uv", "install.md, pip"],
)
def test_the_line_for_a_cpu_gives_a_server_that_answers(
    page: Path, beginning: str, environment: Path, tmp_path: Path
) -> None:
    programs = make_environment(environment, "3.11")
    line = line_of(page, beginning)
    if has_find_links():
        line = line.replace("--torch-backend cpu ", "").replace('--extra-index-url "$TORCH_CPU_INDEX" ', "")
    elif "TORCH_CPU_INDEX" in line and "TORCH_CPU_INDEX" not in os.environ:
        pytest.skip("TORCH_CPU_INDEX names no index of torch's CPU builds")
    uv_folder = ROOT / ".build" / "uv" / "bin"
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}:{uv_folder}",
        "VIRTUAL_ENV": str(environment),
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
    }
    done = subprocess.run(
        shlex.split(line), cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    check_server(programs, tmp_path)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_built_server_installs_and_answers(
    kind: str, built: dict[str, Path], environment: Path, tmp_path: Path
) -> None:
    programs = make_environment(environment, "3.11")
    options = [] if has_find_links() else ["--torch-backend", "cpu"]
    done = uv("pip", "install", "--python", programs / "python", *options, f"{built[kind]}[server]")
    assert done.returncode == 0, done.stderr[-2000:]
    check_server(programs, tmp_path)
