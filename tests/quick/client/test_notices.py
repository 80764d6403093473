import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from art.notices import Notices, left_out_sentence
from art_protocol.wire import Difference, Dropped, JobReport
from tests.waiting import PATIENCE_SECONDS

EQUAL = Dropped(reason="all rewards in the group are equal: no signal", count=1, unit="group")


def report(*dropped: Dropped, notes: tuple[str, ...] = ()) -> JobReport:
    return JobReport(num_trajectories=48, num_trajectories_trained=40, dropped=list(dropped), notes=list(notes))


def test_what_was_left_out_is_a_sentence_with_number_and_reason() -> None:
    failed = Dropped(reason="the rollout failed", count=2, unit="rollout")
    turn = Dropped(reason="the sampled text is empty", count=1, examples=["groups[0].x"])
    assert left_out_sentence(report(EQUAL, failed, turn)) == (
        "40 of 48 trajectories trained. Left out: 1 group, because all rewards in the group are equal: no signal; "
        "2 rollouts, because the rollout failed; 1 turn, because the sampled text is empty. For example groups[0].x."
    )
    assert left_out_sentence(report()) is None


def test_turns_that_do_not_continue_are_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "art.notices")
    notices = Notices()
    for count, text in ((1, "a</code>"), (8, "b</code>")):
        difference = Difference(
            whose="the policy's answer", expected=text[0], found=text, count=count, example="groups[0].x"
        )
        notices.job(report().model_copy(update={"differences": [difference]}))
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert "8 rollouts" in caplog.text and "'b</code>'" in caplog.text and "groups[0].x" in caplog.text


def test_a_notice_is_a_warning_once_even_with_other_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "art.notices")
    notices = Notices()
    for count in (1, 2, 3):
        note = f"{count} tokens were sampled with temperature 0"
        notices.job(report(EQUAL.model_copy(update={"count": count}), notes=(note,)))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] * 2 + [logging.INFO] * 4


PROGRAM = """
import asyncio
from art import notices

async def main():
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        notices.interrupted("/home/me/.art", {"demo/b": 3, "demo/a": 12}, {"demo/a": 13})
        raise

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_prints_one_line_and_no_traceback(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with program:
        try:
            assert program.stdout is not None and program.stdout.readline() == "ready\n"
            os.kill(program.pid, signal.SIGINT)
            _, said = program.communicate(timeout=PATIENCE_SECONDS)
        finally:
            program.kill()
    assert said.startswith(
        "\nart: stopped. /home/me/.art has demo/a at step 12, demo/b at step 3. The next run continues"
    )
    assert "step 13 of demo/a" in said and "Traceback" not in said
    assert program.returncode == -signal.SIGINT
