"""A program of test_families.py: trains one step of each named family, then vLLM scores a text with the trained
adapter.

It prints one JSON line per family: the largest difference between the log-probabilities of trainer and engine, for the
base and with the adapter. vLLM runs with our plugin inside this process, because a new engine process takes 20 s or
more to start.
"""

import gc
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from art.wire import LoRAConfig, TrainConfig
from art_server.base_facts import read_facts
from art_server.base_models import BaseModel
from art_server.engine import command
from art_server.settings import ServerConfig
from art_server.shared import switches
from art_server.shared.tasks import (
    Batch,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
)
from art_server.trainer.checkpoint import write_first_checkpoint
from art_server.trainer.policy import Policy
from art_server.trainer.step import train
from tests.toy_models import make_model

LORA = LoRAConfig(rank=8)
LEARNING_RATE = 0.03
"""Large, so that one step changes log-probabilities by more than any rounding."""


def main() -> None:
    os.environ[switches.EXPERTS_SWITCH] = "1"  # each process reads it once
    token_ids = random.Random(0).choices(range(3, 1300), k=60)
    for family in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"family": family, **measure(family, Path(folder), token_ids)}))


def measure(family: str, folder: Path, token_ids: list[int]) -> dict[str, float]:
    base, after = make_model(family, folder / "base"), folder / "0001"
    trained, plain = take_step(base, folder, after, token_ids)
    environment = command.engine_environment(ServerConfig(), BaseModel(family, base), "cpu", {})
    os.environ |= environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    # Imported here, because vLLM reads the environment at import.
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    facts = read_facts(base)
    engine = LLM(
        str(base),
        enable_lora=True,
        max_lora_rank=LORA.rank,
        lora_target_modules=list(facts.lora_modules) if facts.is_mixture else None,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        block_size=command.CPU_BLOCK_SIZE,
    )
    gaps = {
        "base": float((score(engine, token_ids, None) - plain).abs().max()),
        "trained": float((score(engine, token_ids, after) - trained).abs().max()),
        "moved": float((trained - plain).abs().max()),
    }
    del engine
    cleanup_dist_env_and_memory()
    gc.collect()
    return gaps


def take_step(
    base: Path, folder: Path, after: Path, token_ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's log-probabilities after a step and before it."""
    write_first_checkpoint(str(base), LORA, 0, folder / "0000")
    policy = Policy(str(base))
    task = TrainTask(
        lora=LORA,
        in_dir=str(folder / "0000"),
        out_dir=str(after),
        config=TrainConfig(learning_rate=LEARNING_RATE),
        batch=a_group(),
    )
    train(policy, task, 4096, lambda _: None)
    trained = policy.sequence_logprobs(token_ids)
    with policy.model.disable_adapter():
        return trained, policy.sequence_logprobs(token_ids)


def a_group() -> Batch:
    """Sequences with a common prompt, and rewards that differ."""
    rng = random.Random(1)
    prompt = rng.choices(range(3, 1300), k=20)
    trajectories = []
    for reward in range(4):
        answer = rng.choices(range(3, 1300), k=20)
        logprobs = [None] * len(prompt) + [-7.0] * len(answer)
        sequence = TokenSequence(token_ids=prompt + answer, logprobs=logprobs)
        trajectories.append(TrainableTrajectory(reward=float(reward), sequences=[sequence]))
    return Batch(groups=[TrainableGroup(trajectories=trajectories)])


def score(engine: Any, token_ids: list[int], adapter: Path | None) -> torch.Tensor:
    """The engine's log-probability of each token but the first. Any: vLLM's LLM."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    request = LoRARequest("trained", 1, str(adapter)) if adapter is not None else None
    (answer,) = engine.generate(
        {"prompt_token_ids": token_ids},
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        lora_request=request,
        use_tqdm=False,
    )
    said = zip(token_ids[1:], answer.prompt_logprobs[1:], strict=True)
    return torch.tensor([entries[token].logprob for token, entries in said])


if __name__ == "__main__":
    main()
