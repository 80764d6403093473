"""TrainerProcess against a fake worker that speaks the protocol and starts at once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.jobs.trainer_process import (
    FIRST_PROGRESS_SECONDS,
    MAX_ANSWER_BYTES,
    SHORTEST_LIMIT_SECONDS,
    TIMES_ITS_PACE,
    TrainerDied,
    TrainerError,
    TrainerProcess,
    worker_command,
    worker_environment,
)
from art_server.process.place import Command, ProcessHere, cpu_seconds
from art_server.shared.trainer_messages import (
    Batch,
    LayersTask,
    MismatchLimits,
    Progress,
    Task,
    TrainTask,
    WorkerConfig,
)
from tests.fakes.clock import FakeClock
from tests.fakes.places import HereInstead
from tests.processes import wait_until_gone
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

FAKE = """
import json, signal, subprocess, sys, time

def answer(**fields):
    print(json.dumps(fields), flush=True)

print("loading", file=sys.stderr, flush=True)
if sys.argv[1] == "broken":
    sys.exit("no such base model")
answer(event="ready")
for line in sys.stdin:
    order = json.loads(line)["out_dir"]
    answer(event="progress", phase="train", completed=1, total=1)
    if order == "fail":
        answer(event="failed", code="non_finite", message="m" * 100_000)
    elif order == "die":
        sys.exit("out of luck")
    elif order == "half":
        sys.stdout.write('{"event":"done","metrics"')
        sys.exit(3)
    elif order == "nonsense":
        print("hello", flush=True)
    elif order == "long":
        print("x" * (int(sys.argv[2]) + 1), flush=True)
    elif order == "hang":
        child = subprocess.Popen(["sleep", "1000"])
        answer(event="progress", phase=str(child.pid), completed=0, total=1)
        time.sleep(1000)
    elif order == "echo":
        answer(event="done", metrics={"length": 0}, notes=[line])
    elif order == "full":
        answer(event="failed", code="no_disk_space", message="os error 28", retryable=True)
    elif order == "cancel":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        answer(event="progress", phase="waits", completed=0, total=1)
        signal.sigwait({signal.SIGUSR1})
        answer(event="failed", code="cancelled", message="c")
    else:
        time.sleep(0.05)
        answer(event="done", metrics={"length": len(line)})
"""


def make_trainer(tmp_path: Path, mode: str = "good", **clock: FakeClock) -> TrainerProcess:
    location = HereInstead(lambda _: [sys.executable, "-c", FAKE, mode, str(MAX_ANSWER_BYTES)])
    trainer = TrainerProcess(location=location, log_path=tmp_path / "logs" / "trainer.log", cache_dir=tmp_path, **clock)
    trainer.use(WorkerConfig(base_model="base"))
    return trainer


def order(out_dir: str) -> LayersTask:
    """A task that trains nothing."""
    return LayersTask(lora=LoRAConfig(), out_dir=out_dir, mismatch_limits=MismatchLimits(high=1.0, wrong=1.0))


def training(out_dir: str) -> TrainTask:
    return TrainTask(lora=LoRAConfig(), in_dir="0", out_dir=out_dir, config=TrainConfig())


async def test_first_task_starts_the_process_and_later_ones_share_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    progress: list[Progress] = []

    async def note(event: Progress) -> None:
        progress.append(event)

    await trainer.run(order("a"), note)
    pid = trainer.pid
    await trainer.run(order("b"))
    assert trainer.pid == pid is not None
    assert [event.phase for event in progress] == ["train"]
    await trainer.stop()
    await trainer.stop()
    assert trainer.pid is None


async def test_tasks_run_one_after_the_other(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    results = await asyncio.gather(*(trainer.run(order("x" * length)) for length in (1, 20, 300)))
    lengths = [done.metrics["length"] for done in results]
    assert [later - lengths[0] for later in lengths] == [0, 19, 299]
    await trainer.stop()


async def test_lines_of_many_megabytes_pass(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    done = await trainer.run(order("x" * 30_000_000))
    assert done.metrics["length"] > 30_000_000
    await trainer.stop()


async def test_failed_task_raises_and_the_process_goes_on(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(TrainerError) as failed:
        await trainer.run(order("fail"))
    assert failed.value.code == "non_finite"
    assert failed.value.message == "m" * 100_000
    assert not failed.value.retryable
    pid = trainer.pid
    await trainer.run(order("a"))
    assert trainer.pid == pid
    await trainer.stop()


async def test_process_that_does_not_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "broken")
    for _ in range(2):
        with pytest.raises(TrainerDied, match=r"\nloading\nno such base model") as died:
            await trainer.run(order("a"))
        assert died.value.message.count("loading") == 1
        assert trainer.pid is None
    assert (tmp_path / "logs" / "trainer.log").read_text().count("loading") == 2


@pytest.mark.parametrize(("ending", "reason"), [("die", "out of luck"), ("half", "3")])
async def test_death_under_a_task_is_reported_and_the_next_task_starts_another(
    tmp_path: Path, ending: str, reason: str
) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(TrainerDied, match=reason):
        await trainer.run(order(ending))
    assert trainer.pid is None
    await trainer.run(order("a"))
    await trainer.stop()


async def test_a_program_that_got_the_id_of_a_process_that_ended_is_not_killed(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(tmp_path)
    await trainer.run(order("a"))
    ended = trainer._process
    assert ended is not None and ended.pid is not None
    os.kill(ended.pid, signal.SIGKILL)
    await ended.wait()
    other = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    other_pid = other.pid
    process: Any = type("Ended", (), {"pid": other_pid, "returncode": -9, "wait": ended.wait})()
    trainer._process = ProcessHere(process, Command(arguments=(), environment={}), None)
    await trainer.stop()
    other.terminate()
    assert await other.wait() == -signal.SIGTERM, "the trainer would have killed it"


async def test_answer_that_is_none_ends_the_process(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(TrainerDied, match="hello"):
        await trainer.run(order("nonsense"))
    await trainer.run(order("a"))
    await trainer.stop()


async def test_an_answer_that_is_too_long_ends_the_process(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(TrainerDied, match=f"an answer of more than {MAX_ANSWER_BYTES} bytes"):
        await trainer.run(order("long"))
    await trainer.run(order("a"))
    await trainer.stop()


async def hang(trainer: TrainerProcess, task: Task | None = None) -> tuple[asyncio.Task, int]:
    """A task that never ends, and the pid of the child that the worker started for it."""
    child: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def on_progress(progress: Progress) -> None:
        if progress.phase.isdigit():
            child.set_result(int(progress.phase))

    running = asyncio.create_task(trainer.run(task or order("hang"), on_progress))
    return running, await child


async def test_cancelled_task_ends_the_process_and_its_children(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    task, child = await hang(trainer)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert trainer.pid is None
    await asyncio.to_thread(wait_until_gone, {child})
    done = await trainer.run(order("a"))
    assert done.metrics
    await trainer.stop()


async def test_stop_under_a_task_ends_it_with_trainer_died(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    task, child = await hang(trainer)
    await trainer.stop()
    with pytest.raises(TrainerDied, match="-9"):
        await task
    await asyncio.to_thread(wait_until_gone, {child})


def test_command_names_only_what_is_set() -> None:
    command = worker_command(WorkerConfig(base_model="base", trainer="peft", threads=2))
    assert command[1:3] == ["-m", "art_server.trainer.worker"]
    assert json.loads(command[3]) == {"base_model": "base", "trainer": "peft", "threads": 2}


def test_unsloth_has_a_worker_of_its_own_which_imports_it_first() -> None:
    modules = [
        worker_command(WorkerConfig(base_model="base", trainer=trainer))[2] for trainer in ("unsloth", "auto", "peft")
    ]
    assert modules == [f"art_server.trainer.{module}" for module in ("unsloth_worker", "worker", "worker")]
    code = (
        "import sys, art_server.trainer.unsloth_worker; print({'transformers', 'peft', 'torch'} & sys.modules.keys())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "set()"


def test_the_workers_environment_allows_no_statistics_and_names_where_code_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = worker_environment(Path("data/unsloth"), {"A": "b", "DO_NOT_TRACK": "0"})
    assert environment["A"] == "b"
    assert environment["DO_NOT_TRACK"] == environment["UNSLOTH_DISABLE_STATISTICS"] == "1"
    assert environment["UNSLOTH_COMPILE_LOCATION"] == str(tmp_path / "data/unsloth")


async def test_a_process_that_shows_nothing_for_much_longer_than_its_pace_is_ended(tmp_path: Path) -> None:
    clock = FakeClock()
    trainer = make_trainer(tmp_path, clock=clock)
    await trainer.run(order("a"))
    assert not trainer._has_trained, "the first step also compiles kernels"
    waits = asyncio.Event()

    async def on_progress(progress: Progress) -> None:
        if progress.phase == "waits":
            waits.set()

    first_step = asyncio.create_task(trainer.run(training("cancel"), on_progress))
    await waits.wait()
    await clock.reach(FIRST_PROGRESS_SECONDS)
    clock.advance(100.0)  # its longest pause
    trainer.cancel()
    with pytest.raises(TrainerError, match="cancelled"):
        await first_step
    first = trainer.pid
    hanging, _ = await hang(trainer, training("hang"))
    await clock.end(TIMES_ITS_PACE * 100.0)
    with pytest.raises(TrainerDied, match="no progress for 2000 s"):
        await hanging
    await trainer.run(order("b"))
    assert trainer.pid not in (None, first)
    await trainer.stop()


async def test_a_process_that_reads_no_batch_is_ended(tmp_path: Path) -> None:
    """A stopped process takes as much as the pipe holds."""
    clock = FakeClock()
    trainer = make_trainer(tmp_path, clock=clock)
    await trainer.run(training("a"))
    assert trainer.pid is not None
    os.kill(trainer.pid, signal.SIGSTOP)
    task = TrainTask(lora=LoRAConfig(), in_dir="0", out_dir="a", config=TrainConfig())
    sending = asyncio.create_task(trainer.run(task, batch=b" " * 4_000_000 + b'{"groups":[]}'))
    await clock.end(SHORTEST_LIMIT_SECONDS)
    with pytest.raises(TrainerDied):
        await sending
    await trainer.stop()


async def test_a_batch_is_passed_on_as_it_is_stored(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    task = TrainTask(lora=LoRAConfig(), in_dir="0", out_dir="echo", config=TrainConfig())
    done = await trainer.run(task, batch=b'{"groups":[],"distributions":[{"temperature":0.5}]}')
    (line,) = done.notes
    read = TrainTask.model_validate_json(line)
    assert read.batch.distributions[0].temperature == 0.5
    assert read.model_copy(update={"batch": Batch(groups=[])}) == task
    await trainer.stop()


async def test_a_full_disk_may_pass_and_a_cancelled_task_ends(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.cancel()  # nothing runs: nothing happens
    with pytest.raises(TrainerError) as failed:
        await trainer.run(order("full"))
    assert failed.value.retryable and failed.value.code == "no_disk_space"
    pid = trainer.pid

    async def cancel_at_once(progress: Progress) -> None:
        trainer.cancel()

    async def cancel(progress: Progress) -> None:
        if progress.phase == "waits":
            trainer.cancel()

    await trainer.run(order("a"), cancel_at_once)  # not a train task: nothing happens

    with pytest.raises(TrainerError) as cancelled:
        await trainer.run(training("cancel"), cancel)
    assert cancelled.value.code == "cancelled" and trainer.pid == pid
    await trainer.stop()


def test_a_worker_gets_no_key_of_the_server(tmp_path: Path) -> None:
    environment = worker_environment(tmp_path, {"ART_API_KEY": "secret", "HOME": "/root"})
    assert "secret" not in environment.values() and environment["HOME"] == "/root"


def test_what_a_process_computes_is_also_what_its_children_compute() -> None:
    """torch compiles kernels in processes of their own, which start others; ended ones count on."""
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    between = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); input()"
    waits = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {between!r}])"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE) as process:
        wait_until(lambda: cpu_seconds(process.pid) >= 0.4)
        assert process.stdin is not None
        process.stdin.close()
    assert cpu_seconds(process.pid) == 0.0
