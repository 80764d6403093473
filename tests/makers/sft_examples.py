"""Examples of supervised fine-tuning, and steps on them."""

import random
from pathlib import Path
from typing import Any

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.trainer_messages import (
    Batch,
    Done,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
)
from art_server.trainer.job import train
from art_server.trainer.policy import Policy

VOCABULARY = 128


BATCH_SIZE, NUM_STEPS = 4, 3


RATES = [1e-3, 5e-4, 2e-4]


MAX_GRAD_NORM = 0.5


def draw(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(low, high))]


def make_examples(shared: bool = False) -> list[tuple[list[int], list[int]]]:
    """Pairs of prompt and answer. Of the shared ones, every two begin with the same prompt."""
    rng = random.Random(0)
    prompts = [draw(rng, 10, 30) for _ in range(BATCH_SIZE * NUM_STEPS)]
    if shared:
        prompts = [prompts[index // 2] for index in range(len(prompts))]
    return [(prompt, draw(rng, 3, 20)) for prompt in prompts]


def make_batch(examples: list[tuple[list[int], list[int]]]) -> Batch:
    groups = []
    for prompt, answer in examples:
        trained = list(range(len(prompt), len(prompt) + len(answer)))
        sequence = TokenSequence(
            token_ids=prompt + answer,
            logprobs=[None] * (len(prompt) + len(answer)),
            recompute=trained,
            advantages=dict.fromkeys(trained, 1.0),
        )
        trajectory = TrainableTrajectory(reward=0.0, sequences=[sequence])
        groups.append(TrainableGroup(trajectories=[trajectory]))
    return Batch(groups=groups)


def run(policy: Policy, adapter_dir: Path, out: Path, batch: Batch, **more: Any) -> Done:
    """A job on the batch."""
    fields = {"objective": "likelihood", "max_grad_norm": MAX_GRAD_NORM, "sampling": "raw"} | more
    config = TrainConfig.model_validate(fields)
    task = TrainTask(lora=LoRAConfig(), in_dir=str(adapter_dir), out_dir=str(out), config=config, batch=batch)
    return train(policy, task, 150, lambda _: None)
