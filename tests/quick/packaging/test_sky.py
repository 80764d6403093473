"""The task of SkyPilot: its commands run here with stand-ins, and its file is read by SkyPilot's own parser."""

import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]


TASK = ROOT / "scripts" / "sky.yaml"


def write_command(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / name).chmod(0o755)


def run_part(part: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `setup` or `run` of the task in ~/sky_workdir, as SkyPilot does, with the commands of ~/bin."""
    task = yaml.safe_load(TASK.read_text())
    workdir = home / "sky_workdir"
    workdir.mkdir(exist_ok=True)
    environment = {**task["envs"], "HOME": str(home), "PATH": f"{home / 'bin'}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", "-c", task[part]],
        cwd=workdir,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_run_starts_the_server_on_loopback_with_a_key_that_only_its_file_holds(tmp_path: Path):
    server = tmp_path / "sky_workdir" / ".venv" / "bin"
    write_command(server, "art-server", 'echo "$@"; echo "variable ${ART_API_KEY-unset}"')
    result = run_part("run", tmp_path, ART_API_KEY="secret-key", ART_SERVER_ARGS="--dtype auto")
    flags = f"--host 127.0.0.1 --port 7623 --path {tmp_path}/art/data --api-key-file {tmp_path}/art/api-key"
    assert result.stdout == f"{flags} --dtype auto\nvariable unset\n" and result.stderr == ""
    key_file = tmp_path / "art" / "api-key"
    assert key_file.read_text() == "secret-key\n" and key_file.stat().st_mode & 0o777 == 0o600


def prepare_setup(home: Path, driver: str | None) -> None:
    write_command(home / "bin", "uv", f'echo uv "$@" >> {home}/log')
    write_command(home / "bin", "g++", "true")
    answer = f'case $1 in -L) echo "GPU 0" ;; *) echo {driver} ;; esac'
    write_command(home / "bin", "nvidia-smi", "exit 1" if driver is None else answer)


@pytest.mark.parametrize(("driver", "extra"), [("580.65.06", "gpu"), (None, "server")])
def test_setup_installs_the_release_outside_a_checkout(tmp_path: Path, driver: str | None, extra: str):
    prepare_setup(tmp_path, driver)
    assert run_part("setup", tmp_path, ART_VERSION="0.1.0").returncode == 0
    assert (tmp_path / "log").read_text().splitlines() == [
        "uv python install 3.12",
        "uv venv --allow-existing --python 3.12 .venv",
        f"uv pip install --python .venv/bin/python agent-reinforcement-trainer[{extra}]==0.1.0",
    ]


def test_setup_installs_a_checkout_as_it_is(tmp_path: Path):
    prepare_setup(tmp_path, "580.65.06")
    write_command(tmp_path / "sky_workdir" / "scripts", "setup", f'echo "setup $@" >> {tmp_path}/log')
    assert run_part("setup", tmp_path).returncode == 0
    assert (tmp_path / "log").read_text().splitlines() == ["uv python install 3.12", "uv python find 3.12", "setup "]


def test_the_setup_script_refuses_an_old_driver_too(tmp_path: Path):
    prepare_setup(tmp_path, "550.90.07")
    for name in ("pyproject.toml", "constraints/gpu.txt", "scripts/setup", "scripts/uv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    result = subprocess.run(
        ["bash", "scripts/setup"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "driver is 550, and torch's CUDA 13.0 needs 580 or newer" in result.stderr
    assert not (tmp_path / "log").exists() and not (tmp_path / ".venv").exists()


def test_setup_refuses_an_old_driver_before_it_installs_anything(tmp_path: Path):
    prepare_setup(tmp_path, "550.90.07")
    result = run_part("setup", tmp_path)
    assert result.returncode == 1 and not (tmp_path / "log").exists()
    assert "550.90.07 is too old: CUDA 13 needs 580" in result.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the launch script, and a `sky` that notes its arguments and variables."""
    write_command(tmp_path / "bin", "sky", f'printf "%s\\n" "$@" > {tmp_path}/sky.log')
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/launch-cluster.sh", ".env.example"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def launch(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", "scripts/launch-cluster.sh", *arguments],
        cwd=checkout,
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_launch_script_makes_a_key_once_and_shows_the_way(checkout: Path):
    first = launch(checkout, "--cluster", "box", "--gpus", "H100:1")
    assert first.returncode == 0, first.stderr
    arguments = ["launch", "--cluster", "box", "--detach-run", "--secret-file", ".env"]
    arguments += ["scripts/sky.yaml", "--cluster", "box", "--gpus", "H100:1"]
    assert (checkout / "sky.log").read_text().splitlines() == arguments
    assert "ssh -N -L 7623:127.0.0.1:7623 box" in first.stdout
    environment = checkout / ".env"
    assert environment.stat().st_mode & 0o777 == 0o600
    key = environment.read_text().splitlines()[-1].removeprefix("ART_API_KEY=")
    assert len(key) == 64 and key not in first.stdout + first.stderr
    content = environment.read_text()
    assert "art" in launch(checkout).stdout and environment.read_text() == content


def test_launch_script_adds_a_key_to_a_file_that_an_editor_left_open(checkout: Path):
    environment = checkout / ".env"
    environment.write_text("WANDB_API_KEY=secret")
    launch(checkout)
    first, second = environment.read_text().splitlines()
    assert first == "WANDB_API_KEY=secret" and second.startswith("ART_API_KEY=")


@pytest.mark.parametrize("line", ["export ART_API_KEY=mine", "  ART_API_KEY=mine"])
def test_launch_script_keeps_a_key_as_shells_write_it(checkout: Path, line: str):
    (checkout / ".env").write_text(f"{line}\n")
    launch(checkout)
    assert (checkout / ".env").read_text() == f"{line}\n"


@pytest.mark.parametrize("flag", ["-cbox", "--cluster=box"])
def test_launch_script_finds_the_name_of_the_cluster(checkout: Path, flag: str):
    assert "sky down box " in launch(checkout, flag).stdout


def test_launch_script_without_skypilot_names_the_command(checkout: Path):
    (checkout / "bin" / "sky").unlink()
    result = launch(checkout)
    assert result.returncode == 1 and not (checkout / ".env").exists()
    assert "pip install '.[sky]'" in result.stderr
