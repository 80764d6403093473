"""Two machines whose numbers are unlike train what one does, or are named in the job's error. A real server and real hosts, on
one machine."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from art_protocol.wire import ErrorDetail, JobList
from tests.live import Server
from tests.ranks import BUDGET, FAULTY, difference
from tests.waiting import until, wait_until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
USER, HOST = "u" * 32, "h" * 32
CONFIG = art.TrainConfig(learning_rate=1e-3)
WORDS = ["tea", "cup", "red", "blue", "north", "south", "cat", "dog"]

UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "number type": ({"dtype": "bfloat16"}, ""),
    "attention": ({}, "from art_server.trainer import facts\nfacts.default_kind = lambda device: 'flex'"),
}


@dataclass
class Machines:
    """A server with one engine and no rank, and what joins it."""

    server: Server
    folder: Path
    _seen: dict[str, int] = field(default_factory=dict)
    """How much of the server's log there was when a host had joined."""

    @contextlib.contextmanager
    def host(self, name: str, unlike: dict[str, Any], code: str = "") -> Iterator[None]:
        """A machine with one rank, whose trainer has other settings and runs `code` first."""
        program = [
            "import sys",
            "from art_server.jobs import trainer_process",
            "from art_server.machines import host",
            f"def command(config): return [sys.executable, {str(FAULTY)!r}, config.model_copy(update={unlike!r})"
            f".model_dump_json(), {str(self.fault(name))!r}, {code!r}]",
            "trainer_process.worker_command = command",
            "host.main(sys.argv[1:])",
        ]
        key = self.folder / "host.txt"
        key.write_text(HOST)
        arguments = ["--join", self.server.url, "--token-file", str(key), "--engines", "0", "--ranks", "1"]
        command = [sys.executable, "-c", "\n".join(program), *arguments, "--name", name]
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [*command, "--path", str(self.folder / name)],
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        try:
            joined = f"host {name} joined"
            wait_until(lambda: joined in (self.folder / "server.log").read_text()[self._seen.get(name, 0) :], self.logs)
            self._seen[name] = (self.folder / "server.log").stat().st_size
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()

    def fault(self, name: str) -> Path:
        """The file that has a host's rank fail (`faulty_rank.py`)."""
        return self.folder / f"fault-{name}"

    def logs(self) -> str:
        return self.server.log_tail() + "".join(file.read_text()[-2000:] for file in self.folder.glob("*.log"))

    def error(self) -> ErrorDetail | None:
        """Why the last attempt at a waiting job failed; None before."""
        answer = httpx.get(f"{self.server.url}/api/jobs", headers={"authorization": f"Bearer {USER}"}, timeout=30)
        jobs = JobList.model_validate(answer.json()).jobs
        return next((job.error for job in jobs if job.finished_at is None), None)


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"{USER} infer,train name=user\n{HOST} host name=machines\n")
    keys.chmod(0o600)
    flags = ["--base-model", "art/tiny", "--ranks", "0", "--api-key-file", str(keys)]
    server = Server(tmp_path, arguments=[*flags, "--max-tokens-per-micro-batch", str(4 * BUDGET)])
    with server.running():
        yield Machines(server, tmp_path)


async def sample(model: art.TrainableModel) -> list[art.TrajectoryGroup]:
    chance = random.Random(0)

    async def rollout(words: tuple[str, str]) -> art.Trajectory:
        # Long questions that begin unlike, so that the job is many trees.
        question = " ".join(words * 10)
        messages: Any = [{"role": "user", "content": f"{question} respond with yes, no, maybe"}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=12
        )
        return art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=chance.random())

    pairs = list(itertools.permutations(WORDS, 2))[::2]
    groups = [art.TrajectoryGroup(rollout(words) for _ in range(4)) for words in pairs]
    return await art.gather_trajectory_groups(groups, pbar_desc=None)


async def test_unlike_machines_train_what_one_does_or_are_named(machines: Machines) -> None:
    folder = machines.folder
    steps = folder / "art" / "p" / "models" / "m" / "checkpoints"

    async def train(name: str) -> dict[str, str]:
        """Trains the groups from step 0, keeps the moments under this name, and goes back. Returns how it was computed. Each
        rank has several micro-batches: with one or two, sums could not differ."""
        await model.train(groups, CONFIG)
        shutil.copy(steps / "0001" / "optimizer.safetensors", folder / f"{name}.safetensors")
        record = json.loads((steps / "0001" / "checkpoint.json").read_text())
        names = ("data/step_num_micro_batches", "data/step_trainable_assistant_tokens", "loss/grad_norm")
        print(name, {key: record["metrics"][key] for key in names}, record["environment"]["ranks"])
        assert record["metrics"]["data/step_num_micro_batches"] >= 4 and record["metrics"]["loss/grad_norm"] > 1e-3
        await model.rollback(0)
        return record["environment"]

    model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
    async with art.Backend(machines.server.url, api_key=USER) as backend:
        await model.register(backend)
        groups = await sample(model)
        with machines.host("one", {}):
            with machines.host("two", {"max_tokens_per_micro_batch": BUDGET}):
                machines.fault("two").write_text("forward fill_memory")
                computed = await train("unlike tokens, out of memory")
                assert (computed["ranks"], computed["max_tokens"]) == ("2", str(BUDGET))
                assert computed["max_tokens_at_end"] == str(BUDGET // 2)
                computed = await train("learned")
                assert (computed["ranks"], computed["max_tokens"]) == ("2", str(BUDGET // 2))
            computed = await train("one rank")
            assert (computed["ranks"], computed["max_tokens"]) == ("1", str(BUDGET // 2))
            for name in ("unlike tokens, out of memory", "learned"):
                deviation = difference(folder / "one rank.safetensors", folder / f"{name}.safetensors")
                print(f"{name}: difference of moments {deviation:.1e}")
                assert deviation < 1e-6
            for name, (unlike, code) in UNLIKE.items():
                with machines.host("two", unlike, code):
                    began = time.monotonic()
                    training = asyncio.create_task(train(name))
                    await until(lambda: machines.error() is not None, machines.logs)
                    error = machines.error()
                    print(f"{name}: after {time.monotonic() - began:.1f} s {error}")
                    assert error is not None and error.code == "unlike_ranks"
                    assert "host one" in error.message and "host two" in error.message and name in error.message
                assert (await training)["ranks"] == "1", "it waits for machines that are alike"
                assert difference(folder / "one rank.safetensors", folder / f"{name}.safetensors") < 1e-6
