"""Models in an art-server: art/tiny learns, published shapes train, and engines and ranks share cards."""

import asyncio
import functools
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gpu_check.machine import ROOT, Cases, Line, Machine
from gpu_check.published import NUM_STEPS, PUBLISHED, published_folder

FLEETS = {
    "tensor parallel": ["--engine-arg", "tensor_parallel_size=2"],
    "two engines and two ranks on the same cards": ["--engines", "2", "--ranks", "2", "--handover", "sleep"],
}
SERVED_METRICS = (
    "loss/logprob_gap_mean",
    "loss/logprob_gap_max",
    "loss/grad_norm",
    "time/step_trainer_s",
    "time/job_check_s",
)


def learns(machine: Machine) -> Cases:
    def learn() -> Line:
        import yes_no_maybe  # pyright: ignore[reportMissingImports]  # of examples/, which gpu-check adds to the path

        line = asyncio.run(_serve(machine, "art/tiny", 25, yes_no_maybe.PROMPTS, yes_no_maybe.score))
        if line["ok"]:
            line["ok"] = line["rewards"][-1] > line["rewards"][0] + 0.1
        return line

    yield "art/tiny", learn


def served(machine: Machine) -> Cases:
    chance = random.Random(0)
    prompts = ["".join(chance.choices(" abcdefgh", k=machine.length(2048))) for _ in range(6)]
    for name in PUBLISHED:

        def serve(name: str = name) -> Line:
            folder = str(published_folder(machine, name))
            return asyncio.run(_serve(machine, folder, NUM_STEPS, prompts, any_reward, 64))

        yield name, serve


def any_reward(_: str) -> float:
    """A random reward: the answers of a model with random weights cannot be judged."""
    return random.random()


def fleet(machine: Machine) -> Cases:
    import yes_no_maybe  # pyright: ignore[reportMissingImports]  # of examples/, which gpu-check adds to the path

    def serve(flags: list[str]) -> Line:
        if torch.cuda.device_count() < 2:
            return {"ok": None, "skipped": f"{torch.cuda.device_count()} cards"}
        prompts, score = yes_no_maybe.PROMPTS, yes_no_maybe.score
        return asyncio.run(_serve(machine, "art/tiny", NUM_STEPS, prompts, score, flags=flags))

    for case, flags in FLEETS.items():
        yield case, functools.partial(serve, flags)


def start_server(path: Path, log: Path, base: str, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "art_server", "--path", str(path), "--base-model", base]
    command += ["--port", "0", "--inference-port", "0", "--exit-with-parent"]
    command += ["--max-seq-length", "2048", *flags]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT)


async def _serve(
    machine: Machine,
    base: str,
    num_steps: int,
    prompts: Sequence[str],
    reward: Callable[[str], float],
    max_tokens: int = 12,
    flags: Sequence[str] = (),
) -> Line:
    """Starts an art-server and trains a model in it. Returns the rewards, seconds and gaps of the steps."""
    if machine.is_gpu and importlib.util.find_spec("vllm") is None:
        return {"ok": None, "skipped": "vLLM is not installed"}
    import art

    path = machine.models / f"server-{time.time_ns()}"
    path.mkdir(parents=True)
    log = path / "server.log"
    started = time.perf_counter()
    process = start_server(path, log, base, [*machine.server_flags, *flags])
    steps: list[Line] = []
    try:
        while not (path / ".server" / "address.json").exists():
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start: {log.read_text()[-1500:]}")
            await asyncio.sleep(0.1)
        address = json.loads((path / ".server" / "address.json").read_text())["url"]
        async with art.Backend(base_url=address) as backend:
            model = art.TrainableModel(name="checked", project="gpu", base_model=base)
            await model.register(backend)
            client = model.openai_client()

            async def rollout(prompt: str) -> art.Trajectory:
                messages: art.Messages = [{"role": "user", "content": prompt}]
                done = await client.chat.completions.create(
                    model=model.get_inference_name(), messages=messages, max_tokens=max_tokens
                )
                choice = done.choices[0]
                gained = reward(choice.message.content or "")
                return art.Trajectory(messages_and_choices=[*messages, choice], reward=gained)

            for step in range(num_steps):
                begun = time.perf_counter()
                asked = [prompts[(6 * step + offset) % len(prompts)] for offset in range(6)]
                groups = await art.gather_trajectory_groups(
                    art.TrajectoryGroup(rollout(prompt) for _ in range(8)) for prompt in asked
                )
                sampled = time.perf_counter()
                gained = [trajectory.reward for group in groups for trajectory in group]
                result = await model.train(groups, config=art.TrainConfig(learning_rate=1e-3))
                metrics = result.metrics
                steps.append(
                    {
                        "reward": statistics.fmean(gained),
                        "sample_s": sampled - begun,
                        "train_call_s": time.perf_counter() - sampled,
                    }
                    | {key: metrics[key] for key in SERVED_METRICS if key in metrics}
                )
    except Exception as error:
        raise RuntimeError(f"after {len(steps)} steps: {error}; {log.read_text()[-3000:]}") from error
    finally:
        process.terminate()
        process.wait()
    whole = time.perf_counter() - started
    gaps = [step["loss/logprob_gap_mean"] for step in steps if "loss/logprob_gap_mean" in step]
    return {
        "steps": steps,
        "server_s": whole,
        "gap_mean": statistics.fmean(gaps),
        "rewards": [round(step["reward"], 3) for step in steps],
        "ok": machine.ok(len(gaps) > num_steps / 2 and max(gaps) < 0.25),
    }
