"""Ten tasks of our own in five styles: the solution gets 1, an agent that does nothing gets 0."""

import os
from pathlib import Path

import pytest

from art import harbor
from art.harbor.running import play
from plugins.harbor.tests.boxed import TASKS, left, needs_bubblewrap, write_task

pytestmark = [pytest.mark.anyio, needs_bubblewrap]


@pytest.mark.parametrize("task", harbor.tasks(TASKS), ids=lambda task: task.name)
async def test_the_solution_gets_1_and_nothing_gets_0(task: harbor.Task) -> None:
    assert (await harbor.solve(task)).reward == 1.0
    assert (await play(task, "true")).reward == 0.0
    assert left() == []


async def test_the_solution_has_its_variables_and_the_tests_do_not(tmp_path: Path) -> None:
    test = '[ "$(cat word)" = hello ] && [ -z "$WORD" ]; echo $((1 - $?)) > /logs/verifier/reward.txt'
    folder = write_task(tmp_path / "task", test, toml="[solution]\nenv = { WORD = 'hello' }\n")
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").write_text('echo "$WORD" > word')
    assert (await harbor.solve(harbor.tasks(folder)[0])).reward == 1.0


async def test_a_task_whose_files_are_private_runs(tmp_path: Path) -> None:
    os.umask(0o077)  # the fixture `umask` takes this back
    folder = write_task(tmp_path / "task", "cat data/a > /logs/verifier/reward.txt")
    (folder / "environment" / "data").mkdir(parents=True)
    (folder / "environment" / "data" / "a").write_text("1")
    assert (await play(harbor.tasks(folder)[0], "true")).reward == 1.0


async def test_without_a_dockerfile_all_files_of_the_environment_are_copied(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", '[ "$(cat data/a)" = a ]; echo $((1 - $?)) > /logs/verifier/reward.txt')
    (folder / "environment" / "data").mkdir(parents=True)
    (folder / "environment" / "data" / "a").write_text("a")
    assert (await play(harbor.tasks(folder)[0], "true")).reward == 1.0
