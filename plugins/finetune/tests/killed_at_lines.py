"""A program: kills a process that writes a run's folder at its line 1, 2, 3..., and what continues it at another line.

    python killed_at_lines.py DIR STRIDE

No write that was finished is done again, and none is lost except the one that was under way. Continued to the end, all files
are those of a run that nothing killed.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import art.files
from art.finetune import folder as folder_module
from art.finetune import plot
from art.finetune.folder import Folder, opened
from art.finetune.run_record import EpochRow, RolloutRecord, ValidationRow, reward_figures

NUM_EPOCHS = 2
CONFIG = {"finetuning": {"num_epochs": NUM_EPOCHS}}
TRACED = {folder_module.__file__, art.files.__file__}


def epoch(number: int) -> EpochRow:
    return EpochRow(
        epoch=number,
        timestamp="2026-11-28T00:00:00+00:00",
        run_id="run",
        **reward_figures([0.0, 1.0]),
        num_trajectories=2,
        num_groups=1,
        filtered_trajectories=2,
        filtered_groups=1,
        **reward_figures([0.0, 1.0], "filtered_"),
        curriculum_percentile=0.3,
        step=number + 1,
    )


def work(folder: Folder) -> Iterator[Callable[[], None]]:
    """The writes that are left to do, each as a call, as a run asks its folder for them."""
    for number in range(len(folder.state.epochs), NUM_EPOCHS + 1):
        if number not in [row.epoch for row in folder.state.validations]:
            row = ValidationRow(epoch=number, timestamp="2026-11-28T00:00:00+00:00", avg_reward=0.4, num_examples=4)
            yield lambda row=row: folder.save(validations=[*folder.state.validations, row])
        if number == NUM_EPOCHS:
            return
        if folder.state.step is None:
            yield lambda number=number: folder.save(step=number)
        for generation in range(2):
            if ("train", number, "0", generation) not in folder.rollouts:
                row = RolloutRecord(epoch=number, row="0", generation=generation, session="s", reward=0.5)
                yield lambda row=row: folder.add_rollout(row)
        yield lambda number=number: folder.save(epochs=[*folder.state.epochs, epoch(number)], step=None)


def files(path: Path, run_id: str, seed: int) -> dict[str, str]:
    """The folder's files, with those names of a run that are drawn replaced."""
    names = [file for file in path.iterdir() if not file.name.startswith(".")]
    return {file.name: file.read_text().replace(run_id, "RUN").replace(str(seed), "SEED") for file in names}


def kill_at(line: int, path: Path) -> int | None:
    """Works on the folder in another process until its given line. Returns how many writes it finished before it was
    killed, or None if it came to its end."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        trace_lines(line)
        with opened(path, CONFIG) as folder:
            for write in work(folder):
                write()
                os.write(writer, b".")
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(process, 0)
    with open(reader, "rb") as finished:
        num_writes = len(finished.read())
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return num_writes
    assert os.waitstatus_to_exitcode(status) == 0, "the process failed"
    return None


def trace_lines(line: int) -> None:
    left = iter(range(line))

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line" and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def finish(path: Path) -> tuple[int, dict[str, str]]:
    """Does the rest of the work. Returns the number of its writes, and the files."""
    with opened(path, CONFIG) as folder:
        num_writes = 0
        for write in work(folder):
            write()
            num_writes += 1
        return num_writes, files(path, folder.state.run_id, folder.state.seed)


def main(path: Path, stride: int) -> None:
    # A killed process loses nothing of what it wrote: only a machine without power does.
    os.fsync = lambda fd: None
    plot.draw = lambda state: b"picture"
    total, expected = finish(path / "unkilled")
    rng = random.Random(0)
    num_kills = 0
    for line in count(rng.randrange(stride), stride):
        run = path / str(line)
        finished = [kill_at(line, run), kill_at(rng.randrange(200), run)]
        if finished[0] is None:
            break
        kills = [num_writes for num_writes in finished if num_writes is not None]
        num_left, left = finish(run)
        if len(kills) < len(finished):
            assert num_left == 0
        else:
            assert 0 <= total - sum(kills) - num_left <= len(kills), (line, total, kills, num_left)
        assert left == expected, line
        num_kills += len(kills)
    print(num_kills, "kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
