"""Measures train requests of long conversations: bytes sent, time and memory of client and server, and bytes kept.

    python scripts/bench/train_requests.py [--cases 128x10x150x350 512x16x512x32] [--tokens] [--train]

A case is ROLLOUTS x TURNS x SAMPLED x OBSERVED tokens of a turn. For each case the ledger is filled with records of
such conversations, then a server starts with a simulated engine and a trainer that computes nothing, and the real
client trains the choices. Prints one JSON line a case: the body in MB, the client's seconds until the body is sent and
accepted, the client's peak memory above the trajectories' own and the server's peak above idle in GiB, and the MB that
the step keeps on disk. `--tokens`: the choices carry their tokens and log-probabilities, as for a program that requests
both. `--train`: the server's trainer trains the choices, with a model of one narrow layer, because two cores need hours
for such jobs with art/tiny.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from openai.types.chat.chat_completion import Choice
from tqdm import tqdm

import art
import art.core.backend

CASES = [
    "128x10x150x350",
    "128x20x150x350",
    "128x40x150x350",
    "128x80x150x350",
    "512x16x512x32",
]
PROJECT, NAME = "bench", "agent"
NO_MODEL = 0
"""The model of the records until the server has given the model a number."""
SIMULATED = Path(__file__).with_name("simulated_engine.py")
MAX_SEQ_LENGTH = 1 << 20
END_ID = 1401
"""The embedded model's token that ends a turn."""


def request_id(rollout: int, turn: int) -> str:
    return f"{rollout * 1000 + turn:032x}"


def conversation_of(rollout: int, turns: int, sampled: int, observed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Each turn's prompt and its sampled tokens."""
    rng = random.Random(rollout)
    prompt: list[int] = []
    for _ in range(turns):
        prompt = prompt + rng.choices(range(300, 1000), k=observed)
        answer = [*rng.choices(range(300, 1000), k=sampled - 1), END_ID]
        yield prompt, answer
        prompt = prompt + answer


def write_narrow_model(folder: Path) -> None:
    """A model of one layer with art/tiny's tokenizer."""
    from art_server.store.base_models import TINY_DIR  # isort: skip - first, for torchvision
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(TINY_DIR, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = Qwen3Config.from_pretrained(
        TINY_DIR,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        hidden_size=32,
        intermediate_size=64,
        head_dim=16,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=1 << 17,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def fill(path: Path, case: list[int]) -> None:
    """Fills the ledger of a server that is not running."""
    from art_server.ledger.ledger import Ledger
    from art_server.ledger.records import Request
    from art_server.shared.engine_messages import FinishedChoice
    from art_server.store.base_facts import read_facts
    from art_server.store.base_models import TINY_DIR

    (path / ".server").mkdir(parents=True, exist_ok=True)
    ledger = Ledger(path / ".server" / "ledger.sqlite")
    ledger.use_tokenizer(TINY_DIR, read_facts(TINY_DIR))
    assert ledger.end_id == END_ID
    rollouts, *shape = case
    sampling = {"n": 1, "temperature": 1.0}
    for rollout in tqdm(range(rollouts), desc="records"):
        for turn, (prompt, answer) in enumerate(conversation_of(rollout, *shape)):
            before = [f"{request_id(rollout, turn - 1)}-0"] if turn else []
            request = Request(
                *(request_id(rollout, turn), "chat", NO_MODEL, 0, PROJECT),
                cited_choices=before,
            )
            with ledger.open_request(request):
                ledger.take_prompt(request.request_id, 0, prompt)
                logprobs = [-random.random() * 3 for _ in answer]
                sample = FinishedChoice("x", 0, "", answer, logprobs, "stop", None, sampling, logprobs)
                ledger.take_samples([(request.request_id, 0, 0, sample)])
            ledger.mark_delivered(request.request_id)
    ledger.close()


def serve(is_trained: bool = False) -> None:
    """art-server with a simulated engine and, unless `is_trained`, a trainer that computes nothing."""
    from art_server import cli
    from art_server.engine import command
    from art_server.jobs import trainer_process
    from art_server.jobs.token_sources import Limits
    from art_server.models import registration

    of_engine, of_worker = command.engine_command, trainer_process.worker_command

    def simulated(*arguments: Any) -> list[str]:
        python, _, _, *rest = of_engine(*arguments)
        return [python, str(SIMULATED), *rest]

    def idle(config: Any) -> list[str]:
        return [sys.executable, __file__, "--worker", *of_worker(config)[3:]]

    command.engine_command = simulated
    if not is_trained:
        trainer_process.worker_command = idle
    registration.Registration.limits = lambda self, model: Limits(1 << 17, MAX_SEQ_LENGTH)
    cli.main()


def work() -> None:
    """A trainer that computes nothing: each step is a copy of the step before, with a record of the batch's tokens."""
    from art_server.process.children import claim_stdout
    from art_server.shared.trainer_messages import Done, Progress, TrainTask
    from art_server.store.model_folder import CONTENT_FILES
    from art_server.trainer import tasks, worker
    from art_server.trainer.token_record import TokenRecord

    def train(policy: Any, task: TrainTask, _: int, report: Any, **__: Any) -> Done:
        folder = Path(task.out_dir)
        for name in CONTENT_FILES:
            if (Path(task.in_dir) / name).exists():
                shutil.copy(Path(task.in_dir) / name, folder / name)
        TokenRecord(task.batch, policy.base_model).write(folder)
        report(Progress(phase="save", completed=0, total=1))
        return Done(metrics={}, environment={"trainer": "idle"})

    tasks.train = train
    worker.main(claim_stdout())


def start_server(path: Path, base_model: str, is_trained: bool) -> tuple[subprocess.Popen[bytes], str]:
    flags = [
        "--path",
        str(path),
        "--port",
        "0",
        "--inference-port",
        "0",
        "--base-model",
        base_model,
        "--gap-limit",
        "0",  # the log-probabilities are random
    ]
    with open(path / "server.log", "wb") as log:
        command = [
            sys.executable,
            __file__,
            "--serve-training" if is_trained else "--serve",
            *flags,
        ]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    file = path / ".server" / "address.json"
    while True:
        assert process.poll() is None, (path / "server.log").read_text()
        try:
            url = json.loads(file.read_text())["url"]
            if httpx.get(f"{url}/ready").status_code == 200:
                return process, url
        except (OSError, ValueError, httpx.TransportError):
            pass
        time.sleep(0.2)


def memory_gib(pid: int, name: str) -> float:
    """VmRSS or VmHWM of a process, in GiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 2**20


def reset_peak(pid: int) -> None:
    """Resets VmHWM."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def make_groups(case: list[int], has_tokens: bool) -> list[art.TrajectoryGroup]:
    """Groups of eight trajectories, with the choices that a server's answers contain."""
    rollouts, turns, sampled, observed = case
    trajectories: list[art.Trajectory] = []
    for rollout in range(rollouts):
        entries: list[Any] = []
        for turn, (prompt, answer) in enumerate(conversation_of(rollout, turns, sampled, observed)):
            mark = {"id": f"{request_id(rollout, turn)}-0", "step": 0, "num_tokens": sampled}
            mark["model"] = f"{PROJECT}/{NAME}"
            rng = random.Random(turn)
            words = " ".join(rng.choices(("word", "tool", "mail", "look", "find"), k=sampled))
            message = {"role": "assistant", "content": words}
            fields: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": message}
            if has_tokens:
                entry = {"token": "word", "logprob": -0.5, "bytes": [119], "top_logprobs": []}
                fields |= {"logprobs": {"content": [dict(entry) for _ in answer]}}
                fields |= {"token_ids": answer, "prompt_token_ids": prompt}
            entries.append({"role": "user", "content": "seen " * observed})
            entries.append(Choice.model_construct(**fields, art=mark))
        reward = float(rollout % 2)
        trajectories.append(art.Trajectory(messages_and_choices=entries, reward=reward))
    return [art.TrajectoryGroup(trajectories[i : i + 8]) for i in range(0, rollouts, 8)]


class Watch:
    """The peak of this process's memory above the memory at the start."""

    def __init__(self) -> None:
        self.start = self.peak = memory_gib(os.getpid(), "VmRSS")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self.peak = max(self.peak, memory_gib(os.getpid(), "VmRSS"))

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return self.peak - self.start


async def measure(path: Path, url: str, pid: int, base_model: str, case: list[int], flags: argparse.Namespace) -> None:
    build, sizes, seconds = art.core.backend.build_train_request, list[int](), list[float]()

    def measured(*arguments: Any, **more: Any) -> bytes:
        started = time.process_time()
        body = build(*arguments, **more)
        sizes.append(len(body))
        seconds.append(time.process_time() - started)
        return body

    async with art.Backend(url) as backend:
        model = art.TrainableModel(name=NAME, project=PROJECT, base_model=base_model)
        began = time.monotonic()
        await model.register(backend)
        registration = time.monotonic() - began
        give_records_to_the_model(path)
        groups = make_groups(case, flags.tokens)
        before = kept_bytes(path)
        idle = memory_gib(pid, "VmRSS")
        reset_peak(pid)
        art.core.backend.build_train_request = measured
        watch, started = Watch(), time.monotonic()
        result = await model.train(groups)
        total = time.monotonic() - started
        client = watch.end()
        kept = kept_bytes(path)
        print(
            json.dumps(
                {
                    "case": "x".join(map(str, case)),
                    "tokens": flags.tokens,
                    "turns_trained": result.report.turns,
                    "rows": result.report.num_rows,
                    "sampled_tokens": result.report.num_trained_tokens,
                    "body_mb": round(sum(sizes) / 1e6, 1),
                    "client_seconds": round(sum(seconds), 2),
                    "client_peak_gib": round(client, 2),
                    "registration_seconds": round(registration, 1),
                    "seconds_until_done": round(total, 1),
                    "server_peak_gib_above_idle": round(memory_gib(pid, "VmHWM") - idle, 2),
                    "kept_mb": {name: round((kept[name] - before[name]) / 1e6, 1) for name in kept},
                    "kept_mb_total": round(sum(kept[n] - before[n] for n in kept) / 1e6, 1),
                }
            ),
            flush=True,
        )


def give_records_to_the_model(path: Path) -> None:
    server_dir = path / ".server"
    with contextlib.closing(sqlite3.connect(server_dir / "server.sqlite")) as database:
        ((number,),) = database.execute("SELECT model FROM models").fetchall()
    with contextlib.closing(sqlite3.connect(server_dir / "ledger.sqlite")) as ledger:
        ledger.execute("UPDATE records SET model = ? WHERE model = ?", (number, NO_MODEL))
        ledger.commit()


def kept_bytes(path: Path) -> dict[str, int]:
    """Bytes on disk of the model's rollouts, records of tokens, and records of steps, and of the queue."""
    folder = path / PROJECT / "models" / NAME
    places = {
        "trajectories": folder.glob("trajectories/*/*"),
        "tokens": folder.glob("tokens/*"),
        "replay": folder.glob("checkpoints/*/replay/batch*"),
    }
    return {name: sum(file.stat().st_size for file in of) for name, of in places.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--tokens", action="store_true", help="choices carry their tokens")
    parser.add_argument("--train", action="store_true", help="the server's trainer trains them")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    case = [int(number) for number in flags.cases[0].split("x")]
    if flags.fill is not None:
        if flags.train:
            write_narrow_model(flags.fill.with_name("model"))
        fill(flags.fill, case)
    elif flags.one is not None:
        base_model = str(flags.one.with_name("model")) if flags.train else "art/tiny"
        process, url = start_server(flags.one, base_model, flags.train)
        try:
            asyncio.run(measure(flags.one, url, process.pid, base_model, case, flags))
        finally:
            process.terminate()
            process.wait()
    else:
        for name in flags.cases:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--cases", name]
                command += ["--tokens"] if flags.tokens else []
                command += ["--train"] if flags.train else []
                for part in ("--fill", "--one"):  # each part runs in a separate process
                    subprocess.run([*command, part, f"{folder}/art"], check=True)


if __name__ == "__main__":
    processes = {
        "--serve": serve,
        "--serve-training": functools.partial(serve, is_trained=True),
        "--worker": work,
    }
    other = processes.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if other is not None:
        sys.argv.pop(1)
    (other or main)()
