"""Runs `nat finetune` on the tic-tac-toe workflow against an art-server, and prints each epoch's rewards.

Without --server this program starts an art-server for the run, with inference port 8000, where the plugin looks for the
server. The toolkit runs in a separate environment, .venv-nat. scripts/nat-demo makes this environment and starts this
program.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import art

ROOT = Path(__file__).parents[2]
CONFIG = Path("examples/nemo_agent_toolkit/configs/tic_tac_toe.yml")
OUTPUT = Path(".tmp/nat/tic_tac_toe/output")
LOG = Path(".tmp/nat/tic_tac_toe/nat.log")
HEALTH_PORT = 8000
"""The plugin has this port hard-wired: on the server's machine something has to answer HTTP on this port."""


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--server", default=None, help="URL of a running art-server")
    flags = parser.parse_args()
    os.chdir(ROOT)
    model = art.TrainableModel(name="nat-tic-tac-toe", project="nat", base_model="art/tiny")
    async with _backend(flags.server) as backend:
        await model.register(backend)
        first = await model.get_step()
        epochs = await finetune(str(model.inference_base_url), flags.epochs)
        num_trained = await model.get_step() - first
    if num_trained < flags.epochs or len(epochs) < flags.epochs:
        sys.exit(
            f"nat finetune ended early: {len(epochs)} of {flags.epochs} epochs were sampled, {num_trained} trained. "
            f"It exits with 0 all the same; the reason stands at the end of {LOG}"
        )
    start, end = epochs[0]["avg_reward"], statistics.fmean(e["avg_reward"] for e in epochs[-2:])
    print(f"mean reward: first epoch {start:.3f}, last two epochs {end:.3f}")
    print(f"plot: {OUTPUT / 'reward_plot.png'}; the toolkit's log: {LOG}")


@contextlib.asynccontextmanager
async def _backend(server: str | None) -> AsyncIterator[art.Backend]:
    if server is None:
        _check_health_port()
        # The plugin sends no key to the control port; this server listens on loopback only.
        flags = ["--inference-port", str(HEALTH_PORT), "--base-model", "art/tiny"]
        backend = art.LocalBackend(server_args=[*flags, "--legacy-without-key"])
        print("starting an art-server, which takes about a minute")
    else:
        backend = art.Backend(server)
    async with backend:
        yield backend


def _check_health_port() -> None:
    try:
        socket.create_server(("127.0.0.1", HEALTH_PORT)).close()
    except OSError:
        sys.exit(
            f"port {HEALTH_PORT} is taken, and NVIDIA's plugin looks for the server on no other: stop what listens "
            "there, or if it is an art-server, pass the address of its control port as --server"
        )


async def finetune(base_url: str, num_epochs: int) -> list[dict[str, Any]]:
    """The lines of training_metrics.jsonl that this run writes. Prints each line when the toolkit has written it."""
    address = urlsplit(base_url)
    overrides = {
        "llms.training_llm.base_url": base_url,
        "trainer_adapters.art_adapter.backend.ip": address.hostname,
        "trainer_adapters.art_adapter.backend.port": address.port,
        "finetuning.num_epochs": num_epochs,
    }
    command = [".venv-nat/bin/nat", "--log-level", "warning", "finetune", f"--config_file={CONFIG}"]
    for key, value in overrides.items():
        command += ["-o", key, str(value)]
    metrics = OUTPUT / "training_metrics.jsonl"
    metrics.unlink(missing_ok=True)  # the toolkit appends to the file of an earlier run
    LOG.parent.mkdir(parents=True, exist_ok=True)
    epochs: list[dict[str, Any]] = []
    with await asyncio.to_thread(LOG.open, "w") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            while process.returncode is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), timeout=1)
                _print_new(metrics, epochs)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    if process.returncode != 0:
        sys.exit(f"nat finetune exited with {process.returncode}; the reason stands at the end of {LOG}")
    return epochs


def _print_new(metrics: Path, epochs: list[dict[str, Any]]) -> None:
    if not metrics.exists():
        return
    if not epochs:
        print("epoch  mean reward    min    max  games", flush=True)
    whole_lines = metrics.read_text().rpartition("\n")[0].splitlines()
    for line in whole_lines[len(epochs) :]:
        epochs.append(json.loads(line))
        e = epochs[-1]
        print(
            f"{e['epoch']:5d}  {e['avg_reward']:11.3f}  {e['min_reward']:5.2f}  {e['max_reward']:5.2f}"
            f"  {e['num_trajectories']:5d}",
            flush=True,
        )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except art.ArtError as error:
        sys.exit(f"nat-demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
