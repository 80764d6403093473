"""The worker, in this process and over its pipes."""

import asyncio
import errno
import gc
import io
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pytest
import torch
from pydantic import BaseModel

from art_protocol.log_file import LogFile
from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.jobs.trainer_process import worker_command
from art_server.shared.trainer_messages import (
    Batch,
    BetweenSteps,
    Done,
    Failed,
    LayersTask,
    Learned,
    LoadTask,
    MismatchLimits,
    Progress,
    Task,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
    WorkerConfig,
)
from art_server.trainer.facts import find_device, own_facts
from art_server.trainer.job import train
from art_server.trainer.policy import Policy
from art_server.trainer.tasks import Worker
from tests.fakes.forked import Forked, start_child
from tests.makers.first_steps import write_first_checkpoint
from tests.processes import is_alive
from tests.waiting import wait_until

LORA = LoRAConfig(rank=4)


def train_task(in_dir: Path, out_dir: Path, batch: Batch) -> TrainTask:
    return TrainTask(
        lora=LORA,
        in_dir=str(in_dir),
        out_dir=str(out_dir),
        config=TrainConfig(learning_rate=1e-3),
        batch=batch,
    )


def with_rewards(batch: Batch, *rewards: float) -> Batch:
    return Batch(
        groups=[
            TrainableGroup(
                trajectories=[
                    TrainableTrajectory(reward=reward, sequences=trajectory.sequences)
                    for trajectory, reward in zip(group.trajectories, rewards, strict=True)
                ]
            )
            for group in batch.groups
        ]
    )


def with_nan(batch: Batch) -> Batch:
    """One sampled log-probability is NaN, and stays so on the pipe."""
    payload = batch.model_dump()
    for row in payload["groups"][0]["trajectories"][0]["rows"]:
        row["logprobs"] = [value if value is None else float("nan") for value in row["logprobs"]]
    return Batch.model_validate(payload)


class Pipes:
    """A worker's process, and what a line of its standard input is answered with."""

    def __init__(self, process: "asyncio.subprocess.Process | Forked") -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self.tasks, self.answers = process, process.stdin, process.stdout

    @classmethod
    async def of(cls, config: WorkerConfig, folder: Path) -> "Pipes":
        return cls(await start_child(worker_command(config), LogFile(folder / "log"), max_line_bytes=2**20))

    async def read(self) -> dict[str, Any]:
        return json.loads(await self.answers.readline())

    async def ask(self, task: BaseModel | bytes) -> list[dict[str, Any]]:
        """Progress, then done or failed."""
        self.tasks.write((task if isinstance(task, bytes) else task.model_dump_json().encode()) + b"\n")
        replies = [await self.read()]
        while replies[-1]["event"] == "progress":
            replies.append(await self.read())
        return replies

    async def end(self) -> None:
        """Closes the standard input; the process ends without another word."""
        self.tasks.write_eof()
        assert await self.answers.read() == b""
        assert await self.process.wait() == 0


@pytest.mark.anyio
async def test_worker_answers_each_line_and_ends_with_its_stdin(
    base_dir: Path, tmp_path: Path, make_batch, policy: Policy
) -> None:
    config = WorkerConfig(
        base_model=str(base_dir),
        trainer="peft",
        dtype="float32",
        threads=1,
        max_tokens_per_micro_batch=64,
    )
    worker = await Pipes.of(config, tmp_path)
    ask = worker.ask
    ready = await worker.read()
    assert ready == {"event": "ready", "facts": own_facts(config)}
    assert ready["facts"]["number type"] == "float32"
    (loaded,) = await ask(LoadTask())
    assert loaded == {
        "event": "done",
        "metrics": {"num_parameters": policy.num_parameters},
        "losses": [],
        "unchanged": False,
        "notes": [],
        "environment": {},
        "optimizer_steps": None,
        "layer_probes": {},
        "probe": None,
    }

    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")
    *progress, done = await ask(train_task(tmp_path / "0", tmp_path / "1", make_batch(1)))
    assert done["event"] == "done"
    counted = [report["completed"] for report in progress if report["phase"] == "train"]
    assert counted == list(range(1, progress[0]["total"] + 1))

    for line in (b"{", b"[]", b'{"kind":"train"}', b'{"kind":"dance"}', b""):
        (failed,) = await ask(line)
        assert (failed["event"], failed["code"]) == ("failed", "bad_task")

    (failed,) = await ask(train_task(tmp_path / "nowhere", tmp_path / "2", make_batch(2)))
    assert (failed["event"], failed["code"]) == ("failed", "trainer_error")
    assert "nowhere" in failed["message"]

    for broken in (with_rewards(make_batch(2), 1e308, -1e308, 0.0), with_nan(make_batch(2))):
        *_, failed = await ask(train_task(tmp_path / "1", tmp_path / "2", broken))
        assert (failed["event"], failed["code"]) == ("failed", "non_finite")
        assert not (tmp_path / "2").exists()

    *_, done = await ask(train_task(tmp_path / "1", tmp_path / "2", make_batch(2)))
    assert done["event"] == "done"

    await worker.end()

    # After all that, the same two steps as in this process.
    for index in (1, 2):
        train(
            policy,
            train_task(tmp_path / f"{index - 1}", tmp_path / f"here{index}", make_batch(index)),
            64,
            lambda _: None,
        )
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "2" / name).read_bytes() == (tmp_path / "here2" / name).read_bytes()


def serve(
    worker_class: type[Worker],
    base_dir: Path,
    *tasks: BaseModel,
    between_steps: BetweenSteps = "stay",
    trainer: Literal["auto", "unsloth", "peft"] = "peft",
) -> list[dict]:
    """What a worker in this process answers, without progress."""
    answers = io.BytesIO()
    config = WorkerConfig(base_model=str(base_dir), trainer=trainer, between_steps=between_steps)
    worker = worker_class(config, answers)
    worker.serve(io.BytesIO(b"".join(task.model_dump_json().encode() + b"\n" for task in tasks)))
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    return [line for line in lines if line["event"] != "progress"]


def test_wherever_the_base_is_between_steps_they_are_the_same(base_dir: Path, tmp_path: Path, make_batch) -> None:
    ways: tuple[BetweenSteps, ...] = ("stay", "leave", "reload")
    for way in ways:
        folder = tmp_path / way
        write_first_checkpoint(str(base_dir), LORA, 0, folder / "0")
        tasks: list[Task] = [
            train_task(folder / f"{index}", folder / f"{index + 1}", make_batch(index)) for index in range(2)
        ]
        (folder / "layers").mkdir(parents=True)
        limits = MismatchLimits(high=1.0, wrong=1.0)
        layers = LayersTask(lora=LORA, out_dir=str(folder / "layers"), mismatch_limits=limits)
        tasks.insert(1, layers)  # it leaves nothing behind for the step after it
        ended = serve(Worker, base_dir, *tasks, between_steps=way)
        assert [answer["event"] for answer in ended] == ["done"] * 3
        assert set(ended[1]["layer_probes"]) == {path.name for path in (folder / "layers").iterdir()}
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert len({(tmp_path / way / "2" / name).read_bytes() for way in ways}) == 1


def test_a_device_that_is_not_there_is_refused() -> None:
    assert find_device("auto") is None
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda:0"):
        find_device("cuda:0")


def test_unsloth_that_cannot_be_imported_is_said_in_one_sentence(base_dir: Path) -> None:
    refused = serve(Worker, base_dir, LoadTask(), LoadTask(), trainer="unsloth")
    for answer in refused:
        assert (answer["event"], answer["code"]) == ("failed", "trainer_error")
        assert "--trainer unsloth" in answer["message"] and "\n" not in answer["message"]


def test_auto_is_peft(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "unsloth", None)
    (loaded,) = serve(Worker, base_dir, LoadTask(), trainer="auto")
    assert loaded["event"] == "done"


@pytest.mark.anyio
async def test_without_unsloth_its_worker_starts_and_answers(base_dir: Path, tmp_path: Path) -> None:
    """Unsloth is imported before the first task. If that fails, the process must not end."""
    worker = await Pipes.of(WorkerConfig(base_model=str(base_dir), trainer="unsloth"), tmp_path)
    assert (await worker.read())["event"] == "ready"
    (failed,) = await worker.ask(LoadTask())
    assert failed["event"] == "failed"
    await worker.end()


class ExhaustedPolicy(Policy):
    """Has no memory left for an adapter."""

    num_alive = 0

    def __init__(self, base_model: str, dtype: torch.dtype | None = None) -> None:
        super().__init__(base_model, dtype)
        ExhaustedPolicy.num_alive += 1

    def __del__(self) -> None:
        ExhaustedPolicy.num_alive -= 1

    def init_adapter(self, lora: LoRAConfig, seed: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


class ExhaustedWorker(Worker):
    def _load_policy(self) -> Policy:
        gc.collect()
        if self._policy is None:
            assert ExhaustedPolicy.num_alive == 0, "the policy of the failed task takes memory still"
            self._policy = ExhaustedPolicy(self._config.base_model, self._dtype)
        return self._policy


def test_out_of_memory_says_what_to_reduce_and_frees_the_policy(base_dir: Path, tmp_path: Path, make_batch) -> None:
    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")
    task = train_task(tmp_path / "0", tmp_path / "1", make_batch(1))
    first, second = serve(ExhaustedWorker, base_dir, task, task)
    assert (first["event"], first["code"]) == ("failed", "out_of_memory")
    assert "20.00 GiB" in first["message"]
    assert second == first


class RefusedPolicy(ExhaustedPolicy):
    """The driver refuses memory outside torch's allocator."""

    def init_adapter(self, lora: LoRAConfig, seed: int) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")


class RefusedWorker(Worker):
    def _load_policy(self) -> Policy:
        return RefusedPolicy(self._config.base_model, self._dtype)


def test_memory_that_the_driver_refuses_does_not_end_the_process(base_dir: Path, tmp_path: Path, make_batch) -> None:
    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")
    task = train_task(tmp_path / "0", tmp_path / "1", make_batch(1))
    (failed,) = serve(RefusedWorker, base_dir, task)
    assert (failed["event"], failed["code"]) == ("failed", "out_of_memory")


class CancelledWorker(Worker):
    """Is told to stop at its first micro-batch, and later that its disk is full."""

    def _report(self, progress: Progress) -> None:
        if progress.phase == "train" and progress.completed == 1:
            self._cancel()
        super()._report(progress)


@pytest.mark.parametrize("between_steps", ["stay", "leave"])
def test_a_cancelled_task_writes_nothing_and_gives_the_device_up(
    base_dir: Path, tmp_path: Path, make_batch, between_steps: BetweenSteps
) -> None:
    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")
    task = train_task(tmp_path / "0", tmp_path / "1", make_batch(1, num_groups=20))
    first, second = serve(CancelledWorker, base_dir, task, task, between_steps=between_steps)
    assert (first["event"], first["code"], first["retryable"]) == ("failed", "cancelled", True)
    assert second == first and not (tmp_path / "1").exists()


def test_a_signal_for_an_earlier_task_leaves_the_next_task_alone(base_dir: Path, tmp_path: Path, make_batch) -> None:
    loaded: list[Policy] = []

    class SignalledWorker(Worker):
        def _make_policy(self) -> Policy:
            loaded.append(super()._make_policy())
            self._cancel()
            return loaded[-1]

    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")
    task = train_task(tmp_path / "0", tmp_path / "1", make_batch(1))
    answers = serve(SignalledWorker, base_dir, LoadTask(), task)
    assert [answer["event"] for answer in answers] == ["done", "done"] and len(loaded) == 1


def kept_in(workers: list[Worker]) -> type[Worker]:
    """A worker that adds itself to the list."""

    class SeenWorker(Worker):
        def serve(self, tasks: BinaryIO) -> None:
            workers.append(self)
            super().serve(tasks)

    return SeenWorker


def test_a_step_that_fails_does_not_stay_on_a_device_that_the_engine_wants(
    base_dir: Path, tmp_path: Path, make_batch
) -> None:
    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")
    workers: list[Worker] = []
    bad = train_task(tmp_path / "0", tmp_path / "1", with_nan(make_batch(1)))
    (failed,) = serve(kept_in(workers), base_dir, bad, between_steps="leave")
    assert failed["code"] == "non_finite"
    assert workers[0]._policy is None


def test_no_gradient_stays_between_steps(base_dir: Path, tmp_path: Path, make_batch) -> None:
    workers: list[Worker] = []
    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")
    *_, done = serve(kept_in(workers), base_dir, train_task(tmp_path / "0", tmp_path / "1", make_batch(1)))
    assert done["event"] == "done"
    policy = workers[0]._policy
    assert policy is not None and all(parameter.grad is None for parameter in policy.parameters.values())


@pytest.mark.parametrize("between_steps", ["leave", "reload"])
def test_the_memory_of_a_step_that_fails_is_free_before_the_answer(
    base_dir: Path, tmp_path: Path, make_batch, between_steps: BetweenSteps
) -> None:
    """Adapted layers are reference cycles with their weights, and the exception's traceback holds the policy."""
    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")
    weights: list[weakref.ref[torch.Tensor]] = []

    class SeenWorker(Worker):
        def _make_policy(self) -> Policy:
            policy = super()._make_policy()
            weights.extend(weakref.ref(parameter) for parameter in policy._base.parameters())
            gc.disable()
            return policy

        def _answer(self, answer: Progress | Learned | Done | Failed) -> None:
            if isinstance(answer, Failed):
                assert not any(weight() is not None for weight in weights)
            super()._answer(answer)

    bad = train_task(tmp_path / "0", tmp_path / "1", with_nan(make_batch(1)))
    try:
        (failed,) = serve(SeenWorker, base_dir, bad, between_steps=between_steps)
    finally:
        gc.enable()
    assert failed["code"] == "non_finite" and weights


def test_a_full_disk_is_no_fault_of_the_task(
    base_dir: Path, tmp_path: Path, make_batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (failed,) = serve(Worker, base_dir, train_task(tmp_path / "0", tmp_path / "1", make_batch(1)))
    assert (failed["code"], failed["retryable"]) == ("no_disk_space", True)


PARENT = """
import asyncio, sys
from pathlib import Path
from art_server.jobs.trainer_process import TrainerProcess
from art_server.process.place import Here
from art_server.shared.trainer_messages import TrainTask, WorkerConfig

async def main(base, folder):
    config = WorkerConfig(base_model=base, threads=1, max_tokens_per_micro_batch=32)
    trainer = TrainerProcess(location=Here(device="cpu"), log_path=folder / "log", cache_dir=folder)
    trainer.use(config)
    task = TrainTask.model_validate_json((folder / "train.json").read_text())
    async def on_progress(progress):
        if progress.completed == 1:
            print(trainer.pid, flush=True)
    await trainer.run(task, on_progress)

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_worker_dies_with_its_parent_in_the_middle_of_a_task(base_dir: Path, tmp_path: Path, make_batch) -> None:
    write_first_checkpoint(str(base_dir), LORA, 0, tmp_path / "0")
    task = train_task(tmp_path / "0", tmp_path / "1", make_batch(1, num_groups=400))
    (tmp_path / "train.json").write_text(task.model_dump_json())
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(base_dir), str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(pid), lambda: f"worker {pid} outlived its parent")
    assert not (tmp_path / "1").exists()
