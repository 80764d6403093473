"""Bars and waiting lines: in place in a terminal, a line now and then in a file."""

import asyncio
import os
import pty
import subprocess
import sys
import termios
import time

import pytest

import art
from art import bars, pool
from art.bars import StatusLine, make_bar
from tests.waiting import until

PROGRAM = """
import time
from art.bars import StatusLine, make_bar
line = StatusLine()
for second in range(50):
    line.show(f"art: {second} s  the engine starts " + 300 * "x", "start")
line.end()
bar = make_bar(desc="gather", total=100)
for _ in range(100):
    bar.update()
    time.sleep(0.002)
bar.close()
"""


def output_in_a_terminal() -> str:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs, stdout=theirs) as program:
        os.close(theirs)
        pieces: list[bytes] = []
        while True:
            try:
                piece = os.read(ours, 2**16)
            except OSError:  # the program has ended
                break
            pieces.append(piece)
        assert program.wait() == 0
    os.close(ours)
    return b"".join(pieces).decode()


def test_a_terminal_has_one_line_that_changes() -> None:
    text = output_in_a_terminal()
    assert text.count("\n") == 1 and text.count("\r") > 20, "the bar's own end is the only line"
    assert max(len(part.rstrip("\r\n")) for part in text.split("\r")) <= 80, "no line wraps"


def test_a_file_has_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "SECONDS", 30.0)
    monkeypatch.setattr(bars, "_printed_at", time.monotonic() - 1000)
    for _ in range(3):
        bar = make_bar(desc="gather", total=100, mininterval=0)
        for _ in range(100):
            bar.update()
        bar.close()
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "\r" not in text and "gather: 100%" in text


@pytest.mark.anyio
async def test_a_file_has_the_beginning_and_the_end_of_a_gather(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "SECONDS", 3600.0)
    monkeypatch.setattr(bars, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr(bars, "_printed_at", time.monotonic() - 4000)
    monkeypatch.setattr(pool, "TICK_SECONDS", 0.01)
    said, beginning = "", asyncio.Event()

    def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "2 running" in said

    async def rollout() -> art.Trajectory:
        await beginning.wait()
        return art.Trajectory(reward=1.0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(art.gather_trajectories(rollout() for _ in range(2)))
        await until(is_said)
        beginning.set()
    first, last = (said + capsys.readouterr().err).splitlines()
    assert "0/2" in first and "2 running" in first and "<" not in first, "no estimate of the time that is left"
    assert "2/2" in last and "reward=1" in last and "running" not in last


def test_a_file_has_the_same_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = StatusLine()
    for second in range(50):
        line.show(f"art: {second} s", "start")
    line.show("art: another", "other")
    line.end("art: ready")
    assert capsys.readouterr().err.splitlines() == ["art: 0 s", "art: another", "art: ready"]
