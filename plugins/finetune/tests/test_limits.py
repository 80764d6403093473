"""Rollouts and evaluators that do not end: a limit holds whatever the code does, and nothing keeps the process."""

import asyncio
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art.finetune
from art.finetune import FinetuneError, limits
from plugins.finetune.tests.commands import end, start
from plugins.finetune.tests.policy_server import PolicyServer
from tests.processes import is_alive
from tests.waiting import until

pytestmark = pytest.mark.anyio

MakeFile = Callable[..., dict[str, Any]]


def failures(folder: Path) -> dict[str, int]:
    """Of the first epoch, by reason."""
    return json.loads((folder / "out" / "training_metrics.jsonl").read_text().splitlines()[0])["failures"]


STUBBORN = {
    "answers late": """
        import asyncio
        async def stubborn(question):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return await answer(question)
    """,
    "goes on": """
        import asyncio
        async def stubborn(question):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()
    """,
}


@pytest.mark.parametrize("code", STUBBORN.values(), ids=STUBBORN)
async def test_a_rollout_that_swallows_its_cancellation_has_failed(
    policy: PolicyServer, folder: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(limits, "CLEANUP_SECONDS", 1.0)
    file = make_file(
        code,
        workflow___type="agent.py:stubborn",
        eval__general__rollout_timeout_seconds=0.1,
        finetuning__max_exceptions=100,
        finetuning__num_epochs=1,
    )
    with pytest.raises(FinetuneError, match="each rollout failed"):
        await art.finetune.run(file)
    assert not policy.trained
    assert failures(folder) == {
        "the rollout took longer than 0.1 s: raise eval.general.rollout_timeout_seconds": 8,
    }


HANGING = {
    "async": "async def hang(output):\n    import asyncio\n    await asyncio.Event().wait()\n",
    "plain": "def hang(output):\n    import threading\n    threading.Event().wait()\n",
}


@pytest.mark.parametrize("code", HANGING.values(), ids=HANGING)
async def test_an_evaluator_that_never_returns_fails_its_rollout(
    policy: PolicyServer, folder: Path, make_file: MakeFile, code: str
) -> None:
    file = make_file(
        code,
        eval__evaluators__reward___type="agent.py:hang",
        eval__general__rollout_timeout_seconds=4.0,
        finetuning__max_exceptions=100,
        finetuning__num_epochs=1,
    )
    with pytest.raises(FinetuneError, match="each rollout failed"):
        await art.finetune.run(file)
    assert "evaluator 'reward' took longer than 4 s: raise eval.general.rollout_timeout_seconds" in failures(folder)


async def test_plain_evaluators_run_beside_each_other(policy: PolicyServer, make_file: MakeFile) -> None:
    code = """
        import threading
        all_of_them = threading.Barrier(4)
        def score(row, output):
            all_of_them.wait()
            return float(output == row["answer"])
    """
    await art.finetune.run(make_file(code, eval__general__max_concurrency=4))
    assert policy.steps["demo/agent"] == 2


async def test_plain_functions_may_return_coroutines_and_raise_anything() -> None:
    async def later() -> int:
        return 3

    assert await (await limits.in_thread(later)) == 3
    with pytest.raises(RuntimeError, match="StopIteration"):
        await limits.in_thread(lambda: next(iter(())))


HANGS = """
    import threading
    def hang(question):
        import openai
        if question == "question 3":
            open("hangs", "w").close()
            threading.Event().wait()
        messages = [{"role": "user", "content": question}]
        with openai.OpenAI() as client:
            completion = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        return completion.choices[0].message.content
"""
IN_A_POOL = """
    import asyncio
    plain = hang
    async def hang(question):
        return await asyncio.to_thread(plain, question)
"""


async def test_a_workflow_that_hangs_for_good_does_not_keep_the_process(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    """In a thread that Python waits for; the next test has a thread of ours."""
    file = make_file(
        HANGS + IN_A_POOL,
        workflow___type="agent.py:hang",
        eval__general__rollout_timeout_seconds=4.0,
        finetuning__max_exceptions=100,
        finetuning__num_epochs=1,
    )
    code_of_exit, text = await end(await start(folder, file))
    assert code_of_exit == 0, text
    assert failures(folder)["the rollout took longer than 4 s: raise eval.general.rollout_timeout_seconds"] >= 2
    assert "Traceback" not in text


async def test_ctrl_c_is_clean_beside_a_thread_that_hangs(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    process = await start(folder, make_file(HANGS, workflow___type="agent.py:hang"))
    await until((folder / "hangs").exists)
    process.send_signal(signal.SIGINT)
    code, text = await end(process)
    assert code == 130 and "Traceback" not in text
    assert text.splitlines()[-1] == ("art: stopped. Finished rollouts are kept; this continues: art finetune file.yml")


async def test_a_check_that_is_stopped_keeps_nothing(policy: PolicyServer, folder: Path, make_file: MakeFile) -> None:
    slow = ["sh", "-c", "touch hangs; exec sleep 10000"]
    process = await start(folder, make_file(workflow={"_type": "command", "command": slow}), "--check")
    await until((folder / "hangs").exists)
    process.send_signal(signal.SIGINT)
    _, text = await end(process)
    assert text.splitlines()[-1] == "art: stopped. This begins again: art finetune file.yml --check"


def programs(folder: Path) -> set[int]:
    """The process ids of the programs that were started."""
    return {int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
async def test_no_signal_leaves_a_program(
    policy: PolicyServer, folder: Path, make_file: MakeFile, number: signal.Signals
) -> None:
    slow = ["sh", "-c", "touch pid-$$; exec sleep 10000"]
    file = make_file(workflow={"_type": "command", "command": slow})
    process = await start(folder, file)
    await until(lambda: len(programs(folder)) == 8)
    pids = programs(folder)
    process.send_signal(number)
    code, text = await end(process)
    await until(lambda: not any(map(is_alive, pids)))
    assert code == 128 + number and "Traceback" not in text
    assert text.splitlines()[-1] == "art: stopped. Finished rollouts are kept; this continues: art finetune file.yml"


async def test_the_loop_answers_while_a_plain_evaluator_waits() -> None:
    release = threading.Event()
    waiting = asyncio.create_task(limits.in_thread(release.wait))
    await asyncio.sleep(0)
    release.set()
    assert await waiting


async def test_a_thread_whose_call_was_cancelled_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    is_running, may_end = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def call() -> None:
        threads.append(threading.current_thread())
        is_running.set()
        may_end.wait()

    waiting = asyncio.create_task(limits.in_thread(call))
    await asyncio.to_thread(is_running.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    may_end.set()
    await asyncio.to_thread(threads[0].join)
    assert not errors
