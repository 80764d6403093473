"""A program: kills a process that writes a run's folder at its line 1, 2, 3..., and what continues it at another line.

    python killed_at_lines.py DIR STRIDE

After each kill, the folder has exactly what was finished, or that and the write that was under way. Continued to the
end, all its files are those of a run that nothing killed.
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
from art.finetune.folder import Folder, RolloutRow
from art.finetune.history import EpochRow, ValidationRow

NUM_EPOCHS = 2
CONFIG = {"finetuning": {"num_epochs": NUM_EPOCHS}, "llms": {"policy": {"_type": "openai", "api_key": "sk-1"}}}
TRACED = {folder_module.__file__, art.files.__file__}


def epoch(number: int) -> EpochRow:
    return EpochRow(
        epoch=number,
        timestamp="2026-11-28T00:00:00+00:00",
        avg_reward=0.5,
        min_reward=0.0,
        max_reward=1.0,
        num_trajectories=2,
        num_groups=1,
        filtered_trajectories=2,
        filtered_groups=1,
        filtered_avg_reward=0.5,
        filtered_min_reward=0.0,
        filtered_max_reward=1.0,
        curriculum_percentile=0.3,
        curriculum_state={"current_percentile": 0.3, "last_expansion_epoch": 0},
        step=number + 1,
    )


def open_folder(path: Path) -> Folder:
    return Folder.open(path, CONFIG, NUM_EPOCHS)


def work(folder: Folder) -> Iterator[Callable[[], None]]:
    """The writes that are left to do, each as a call, as a run asks its folder for them."""
    for number in range(len(folder.epochs), NUM_EPOCHS + 1):
        if number not in [row.epoch for row in folder.validations]:
            row = ValidationRow(epoch=number, timestamp="2026-11-28T00:00:00+00:00", avg_reward=0.4, num_examples=4)
            yield lambda row=row: folder.add_validation(row)
        if number == NUM_EPOCHS:
            return
        known = [row.generation for row in folder.rollouts(number)]
        for generation in {0, 1} - set(known):
            row = RolloutRow(number, "0", generation, f"{number}-{generation}", 0.5)
            yield lambda row=row: folder.add_rollout(row)
        if folder.noted("training") != number:
            yield lambda number=number: folder.note("training", number)
        yield lambda number=number: folder.add_epoch(epoch(number))


def content(folder: Folder) -> list[Any]:
    rollouts = [folder.rollouts(number) for number in range(NUM_EPOCHS)]
    return [folder.epochs, folder.validations, folder.noted("training"), rollouts]


def files(path: Path, run_id: str) -> dict[str, str]:
    names = [file for file in path.iterdir() if not file.name.startswith(".")]
    return {file.name: file.read_text().replace(run_id, "RUN") for file in names}


def kill_at(line: int, path: Path) -> int | None:
    """Works on the folder in another process until its given line. Returns how many writes it finished before it was
    killed, or None if it came to its end."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        trace_lines(line)
        for write in work(open_folder(path)):
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


def unkilled(path: Path) -> tuple[list[list[Any]], dict[str, str]]:
    """The folder's content after 0, 1, 2... writes, and its files after the last."""
    with open_folder(path) as folder:
        contents = [content(folder)]
        for write in work(folder):
            write()
            contents.append(content(folder))
        return contents, files(path, folder.run_id)


def check(path: Path, num_before: int, num_writes: int, contents: list[list[Any]]) -> int:
    """Asserts that the folder has as many writes as were finished, or one more. Returns their number."""
    with open_folder(path) as folder:
        num_there = contents.index(content(folder))
    assert num_there - num_before - num_writes in (0, 1), (num_there, num_before, num_writes)
    return num_there


def main(path: Path, stride: int) -> None:
    # A killed process loses nothing of what it wrote: only a machine without power does.
    os.fsync = lambda fd: None
    plot.draw = lambda epochs, validations, mark: mark.encode()
    contents, expected = unkilled(path / "unkilled")
    rng = random.Random(0)
    num_kills = 0
    for line in count(rng.randrange(stride), stride):
        run = path / str(line)
        num_writes = kill_at(line, run)
        if num_writes is None:
            break
        num_there = check(run, 0, num_writes, contents)
        again = kill_at(rng.randrange(200), run)
        if again is not None:
            check(run, num_there, again, contents)
        num_kills += 1 + (again is not None)
        with open_folder(run) as folder:
            for write in work(folder):
                write()
            assert content(folder) == contents[-1]
            assert files(run, folder.run_id) == expected, line
    print(num_kills, "kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
