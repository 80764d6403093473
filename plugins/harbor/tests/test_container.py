"""The command lines of `Container`, by an engine that only writes them down. tests/long/test_podman.py has a real engine."""

import io
import json
import os
import stat
import sys
import tarfile
from pathlib import Path

import pytest

from art import harbor
from art.harbor import boxes
from art.harbor.container import read_archive
from art.harbor.running import play
from plugins.harbor.tests.boxed import write_task

pytestmark = pytest.mark.anyio

ENGINE = """#!{python}
import io, json, sys, tarfile
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[0] == "ps":
    print({listed!r})
elif words[0] == "build":
    print("sha256:built")
elif words[0] == "inspect":
    print({{"{{{{.State.Running}}}}": "true", "{{{{.Config.WorkingDir}}}}": "/srv"}}[words[2]])
elif words[0] == "cp" and words[-1] == "-":
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
        member = tarfile.TarInfo("./reward.txt")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"1"))
"""
IMAGE = "[environment]\ndocker_image = 'debian:12'\ncpus = 2\nenv = { A = 'b' }\n"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands of an engine `docker`, which lists a container of this program and one of a program that has ended."""
    (tmp_path / "bin").mkdir()
    engine, log = tmp_path / "bin" / "docker", tmp_path / "log"
    alive = f"ours {os.getpid()}:{boxes.started_at(os.getpid())}"
    engine.write_text(ENGINE.format(python=sys.executable, log=str(log), listed=f"{alive}\nleft {os.getpid()}:1\n"))
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return log


def commands(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


async def test_a_rollout_starts_fills_and_removes_a_container(tmp_path: Path, log: Path) -> None:
    (task,) = harbor.tasks(write_task(tmp_path / "task", "true", toml=IMAGE))
    outcome = await play(task, "agent", variables={"OPENAI_MODEL": "m"}, sandbox=harbor.Container("docker"))
    assert outcome.reward == 1.0
    lines = commands(log)
    (started,) = [line for line in lines if line[0] == "run"]
    name = started[started.index("--name") + 1]
    assert started[-4:] == ["--entrypoint", "sleep", "debian:12", "infinity"]
    options = [
        "--network none",
        "--security-opt no-new-privileges",
        "--memory 2048m",
        "--memory-swap 2048m",
        "--pids-limit 256",
    ]
    assert all(option in " ".join(started) for option in [*options, "--cpus 2", "--env A=b"])
    runs = [line for line in lines if line[0] == "exec" and "bash" in line]
    assert [line[-3:] for line in runs] == [[name, "bash", "/art/command.sh"]] * 2
    assert "OPENAI_MODEL=m" in runs[0] and "OPENAI_MODEL=m" not in runs[1] and runs[0][1:3] == ["--workdir", "/srv"]
    tests_copied = lines.index(["cp", f"{task.tests}/.", f"{name}:/tests"])
    restarted = lines.index(["restart", "--time", "0", name])
    assert lines.index(runs[0]) < restarted < tests_copied < lines.index(runs[1])
    assert lines[-1] == ["rm", "--force", "--volumes", name]


async def test_what_a_killed_program_left_is_removed(tmp_path: Path, log: Path) -> None:
    (task,) = harbor.tasks(write_task(tmp_path / "task", "true", toml=IMAGE))
    await (await harbor.Container("docker").start(task)).stop()
    removed = [line[-1] for line in commands(log) if line[0] == "rm"]
    assert removed[0] == "left" and "ours" not in removed


async def test_an_image_is_built_from_the_dockerfile(tmp_path: Path, log: Path) -> None:
    folder = write_task(tmp_path / "task", "true")
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM debian:12\nRUN true")
    await (await harbor.Container("docker").start(harbor.tasks(folder)[0])).stop()
    assert ["build", "--quiet", str(folder / "environment")] in commands(log)
    assert any("sha256:built" in line for line in commands(log) if line[0] == "run")


NOT_IN_CONTAINERS = {"": "names no image", "[environment]\ngpus = 1": "gpus", "[[steps]]\na = 1": "steps"}


@pytest.mark.parametrize(("toml", "named"), NOT_IN_CONTAINERS.items())
async def test_what_a_container_cannot_give_is_refused(tmp_path: Path, toml: str, named: str) -> None:
    (task,) = harbor.tasks(write_task(tmp_path / "task", "", toml=toml))
    with pytest.raises(harbor.TaskRefused, match=named):
        await harbor.Container("docker").start(task)


async def test_an_engine_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (task,) = harbor.tasks(write_task(tmp_path / "task", "", toml=IMAGE))
    with pytest.raises(harbor.SandboxFailed, match="docker is not installed"):
        await harbor.Container("docker").start(task)


def test_links_in_results_are_not_followed() -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, kind in (("./", tarfile.DIRTYPE), ("./reward.json", tarfile.SYMTYPE), ("./folder", tarfile.DIRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        member = tarfile.TarInfo("./folder/reward.txt")
        tar.addfile(member, io.BytesIO())
    assert read_archive(archive.getvalue()) == {"reward.json": None, "folder": None}
