"""What agents, tests and programs do wrong: the reward is right or none, and nothing is left."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from art import harbor
from art.harbor import boxes
from art.harbor.running import play
from plugins.harbor.tests.boxed import TASKS, holders, left, needs_bubblewrap, processes_of_boxes, write_task
from plugins.harbor.tests.faults import FAULTS, SANDBOX, end_of
from tests.processes import is_alive
from tests.waiting import until

pytestmark = [pytest.mark.anyio, needs_bubblewrap]


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_gives_the_right_reward_or_none_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    assert await end_of(FAULTS[name], tmp_path / "task") == FAULTS[name].ends
    assert left() == []


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def holder_of_box() -> int:
    return holders()[0]


def outside_of_box() -> int:
    """bubblewrap's process outside of the box."""
    return children(holder_of_box())[0]


def first_in_box() -> int:
    """Process 1 of the box."""
    return children(outside_of_box())[0]


@pytest.mark.parametrize("victim", [holder_of_box, outside_of_box, first_in_box], ids=lambda victim: victim.__name__)
@pytest.mark.parametrize("phase", ["agent", "tests"])
async def test_a_sandbox_that_is_killed_is_a_failed_rollout_by_name(
    tmp_path: Path, victim: Callable[[], int], phase: str
) -> None:
    waits = "echo running > /logs/verifier/reward.txt; sleep 1000"
    folder = write_task(tmp_path / "task", "echo 1 > /logs/verifier/reward.txt; " + (waits if phase == "tests" else ""))
    (task,) = harbor.tasks(folder)
    rollout = asyncio.create_task(play(task, waits if phase == "agent" else "true"))
    await until(lambda: any("sleep 1000" in line for line in processes_of_boxes()))
    os.kill(victim(), signal.SIGKILL)
    with pytest.raises(harbor.SandboxFailed):
        await rollout
    assert left() == []


async def test_a_cancelled_rollout_leaves_nothing(tmp_path: Path) -> None:
    (task,) = harbor.tasks(write_task(tmp_path / "task", "true"))
    rollout = asyncio.create_task(play(task, "setsid sleep 1000"))
    await until(lambda: any("sleep 1000" in line for line in processes_of_boxes()))
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert left() == []


async def test_what_the_sandbox_lacks_is_named(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = harbor.tasks(TASKS / "hello-file")
    with pytest.raises(harbor.SandboxFailed, match="nowhere"):
        await harbor.Bubblewrap(mounts={"/opt/a": tmp_path / "nowhere"}).start(task)
    assert left() == []
    with monkeypatch.context() as patch, pytest.raises(harbor.SandboxFailed, match="bwrap is not installed"):
        patch.setenv("PATH", str(tmp_path))
        await harbor.Bubblewrap().start(task)
    assert left() == []
    with monkeypatch.context() as patch, pytest.raises(harbor.SandboxFailed, match="no folder for a box"):
        (home / "file").write_text("")
        patch.setenv("HOME", str(home / "file"))
        await harbor.Bubblewrap().start(task)


PROGRAM = """
import asyncio, sys
from art import harbor
from art.harbor.running import play

(task,) = harbor.tasks(sys.argv[1])

async def main():
    await asyncio.gather(*(play(task, "setsid sleep 1000 & sleep 1000") for _ in range(3)))

asyncio.run(main())
"""


async def start_program(folder: Path) -> asyncio.subprocess.Process:
    """A program with three boxes, in which agents run."""
    write_task(folder, "true")
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, folder)
    await until(lambda: len(holders()) == 3 and sum("sleep 1000" in line for line in processes_of_boxes()) >= 6)
    return program


async def test_a_killed_program_leaves_folders_until_the_next_start(tmp_path: Path) -> None:
    program = await start_program(tmp_path / "task")
    program.kill()
    await program.wait()
    await until(lambda: processes_of_boxes() == [])
    assert len(left()) >= 3
    (task,) = harbor.tasks(TASKS / "hello-file")
    assert (await harbor.solve(task)).reward == 1.0
    assert left() == []


async def test_processes_that_survive_a_killed_program_end_at_the_next_start(tmp_path: Path) -> None:
    program = await start_program(tmp_path / "task")
    pids = holders()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # a stopped process does not see that its program ends
    program.kill()
    await program.wait()
    assert all(map(is_alive, pids))
    (task,) = harbor.tasks(TASKS / "hello-file")
    assert (await harbor.solve(task)).reward == 1.0
    await until(lambda: left() == [], left)


async def test_a_running_programs_boxes_are_left_alone(tmp_path: Path) -> None:
    program = await start_program(tmp_path / "task")
    pids = holders()
    try:
        (task,) = harbor.tasks(TASKS / "hello-file")
        assert (await harbor.solve(task)).reward == 1.0
        assert holders() == pids and all(map(is_alive, pids))
    finally:
        program.kill()
        await program.wait()
    await until(lambda: processes_of_boxes() == [])
    boxes.new_folder().remove()
    assert left() == []


async def test_boxes_side_by_side_do_not_meet(tmp_path: Path) -> None:
    """One kills all that it may and takes all processes that it may; the other ones have what they need."""
    (task,) = harbor.tasks(write_task(tmp_path / "task", "[ -e done ]; echo $((1 - $?)) > /logs/verifier/reward.txt"))
    bomb = "for _ in $(seq 99); do sleep 5 & done; sleep 0.3; kill -9 -1"
    work = "for _ in $(seq 9); do (sleep 0.2) || exit 1; done; touch done"
    outcomes = await asyncio.gather(*(play(task, command, sandbox=SANDBOX) for command in (bomb, work, bomb, work)))
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0, 0.0, 1.0]
    assert left() == []
