"""What is read of a task, and what is refused."""

from pathlib import Path

import pytest

from art import harbor
from art.harbor.dockerfile import read_dockerfile
from plugins.harbor.tests.boxed import TASKS, write_task


def test_a_folder_of_tasks_is_a_list_of_scenarios() -> None:
    tasks = {task.name: task for task in harbor.tasks(TASKS)}
    assert len(tasks) == 10 and list(tasks) == sorted(tasks)
    task = tasks["longest-word"]
    assert task.instruction.startswith("Write the longest word")
    assert task.settings.agent.timeout_sec == 30 and task.settings.verifier.timeout_sec == 600
    assert task.unused == ("source", "agent.max_turns", "environment.build_timeout_sec")
    assert tasks["keep-going"].unused == ("artifacts",)


def test_a_task_is_a_list_of_one() -> None:
    assert [task.name for task in harbor.tasks(TASKS / "hello-file")] == ["hello-file"]


WRONG = {
    "[agent]\ntimeout_sec = 'long'": "agent.timeout_sec",
    "[agent]\ntimeout_sec = 0": "agent.timeout_sec",
    "[agent]\ntimeout_sec = nan": "agent.timeout_sec",
    "[agent]\ntimeout_sec = inf": "agent.timeout_sec",
    "[agent]\ntimeout_sec = true": "agent.timeout_sec",
    "[verifier]\nenv = { A = 1 }": "verifier.env.A",
    "[verifier]\nenv = ['A']": "verifier.env",
    "[environment]\nmemory_mb = '2G'": "environment.memory_mb",
    "[environment]\nmemory_mb = -1": "environment.memory_mb",
    "[environment]\nworkdir = 7": "environment.workdir",
    "[environment]\nnetwork_mode = 'some'": "environment.network_mode",
    "steps = 'one'": "steps",
    "agent = 'pi'": "agent",
    "[agent": "TOML",
}


@pytest.mark.parametrize(("toml", "named"), WRONG.items())
def test_a_wrong_value_is_refused_with_its_field(tmp_path: Path, toml: str, named: str) -> None:
    with pytest.raises(harbor.TaskRefused, match=named):
        harbor.tasks(write_task(tmp_path / "task", "", toml=toml))


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_missing_file_is_refused_with_its_name(tmp_path: Path, missing: str) -> None:
    folder = write_task(tmp_path / "task", "")
    (folder / missing).unlink()
    with pytest.raises(harbor.TaskRefused, match=missing):
        harbor.tasks(folder)


def test_an_empty_instruction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(harbor.TaskRefused, match=r"instruction\.md is empty"):
        harbor.tasks(write_task(tmp_path / "task", "", instruction=" \n"))


NOT_IN_BUBBLEWRAP = {
    "[environment]\ndocker_image = 'debian:12'": "docker_image",
    "[environment]\nmcp_servers = [{ name = 'a' }]": "mcp_servers",
    "[environment]\nhealthcheck = { command = 'true' }": "healthcheck",
    "[environment]\ngpus = 1": "gpus",
    "[environment]\nallow_internet = true": "allow_internet",
    "[environment]\nnetwork_mode = 'public'": "environment.network_mode",
    "[agent]\nnetwork_mode = 'allowlist'": "agent.network_mode",
    "[agent]\nuser = 'root'": "agent.user",
    "[verifier]\nenvironment_mode = 'separate'": "environment_mode",
    "[verifier.environment]\ndocker_image = 'debian:12'": "verifier.environment",
    "[environment]\nos = 'windows'": "environment.os windows",
    "[solution]\nenv = { KEY = '${OPENAI_API_KEY}' }": "solution.env.KEY",
    "[verifier]\nenv = { KEY = '${OPENAI_API_KEY}' }": "verifier.env.KEY",
    "[environment]\nmemory_mb = 100000": "memory_mb",
    "[environment]\nstorage_mb = 100000": "storage_mb",
    "[environment]\nworkdir = 'app'": "workdir",
    "[environment]\nworkdir = '/'": "workdir",
    "[environment]\nworkdir = '/usr/src'": "workdir",
    "[environment]\nworkdir = '/tests'": "workdir",
    "[[steps]]\nname = 'a'": "steps",
}


@pytest.mark.anyio
@pytest.mark.parametrize(("toml", "named"), NOT_IN_BUBBLEWRAP.items())
async def test_what_bubblewrap_cannot_give_is_refused_with_the_reason(tmp_path: Path, toml: str, named: str) -> None:
    (task,) = harbor.tasks(write_task(tmp_path / "task", "", toml=toml))
    with pytest.raises(harbor.TaskRefused, match=named):
        await harbor.Bubblewrap().start(task)


DOCKERFILES = {
    "FROM debian:12\nRUN apt-get install -y git": "RUN apt-get",
    "FROM debian:12\nUSER nobody": "USER nobody",
    "FROM debian:12\nADD https://host/file .": "ADD",
    "FROM debian:12\nCOPY --from=build a .": "--from=build",
    'FROM debian:12\nCOPY ["a", "."]': "COPY",
    "FROM debian:12\nFROM debian:12": "several FROM",
    "FROM debian:12\nCOPY ../secret .": "names no file",
    "FROM debian:12\nCOPY missing .": "names no file",
    "FROM debian:12\nWORKDIR /app\nCOPY a ../b": "outside",
    "FROM debian:12\nWORKDIR /app\nCOPY a /etc/b": "outside",
    "FROM debian:12\nWORKDIR /app\nRUN a && \\\n  b": "RUN a",
}


@pytest.mark.anyio
@pytest.mark.parametrize(("text", "named"), DOCKERFILES.items())
async def test_a_dockerfile_that_needs_an_image_is_refused(tmp_path: Path, text: str, named: str) -> None:
    folder = write_task(tmp_path / "task", "")
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text(text)
    (folder / "environment" / "a").write_text("a")
    (folder / "secret").write_text("secret")
    with pytest.raises(harbor.TaskRefused, match=named):
        await harbor.Bubblewrap().start(harbor.tasks(folder)[0])


@pytest.mark.anyio
async def test_a_compose_file_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", "")
    (folder / "environment").mkdir()
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}")
    with pytest.raises(harbor.TaskRefused, match="compose"):
        await harbor.Bubblewrap().start(harbor.tasks(folder)[0])


def test_a_plain_dockerfile_is_read(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "# a comment\nFROM debian:12\nWORKDIR /srv\nWORKDIR app\nENV A=1 B='2 3'\nCOPY a \\\n  b data/\nCMD bash\n"
    )
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    contents = read_dockerfile(tmp_path)
    assert str(contents.workdir) == "/srv/app" and contents.variables == {"A": "1", "B": "2 3"}
    assert [(source.name, str(path), is_folder) for source, path, is_folder in contents.copies] == [
        ("a", "/srv/app/data", True),
        ("b", "/srv/app/data", True),
    ]
