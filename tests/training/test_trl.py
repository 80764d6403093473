"""The same step as TRL 1.16's GRPOTrainer on the same tokens, advantages and old log-probabilities."""

import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from art.wire import LoRAConfig, TrainConfig
from art_server.training.advantages import group_advantages
from art_server.training.policy import ADAPTER_FILE, Policy
from art_server.training.step import train
from art_server.training.task import Batch, Row, TrainableGroup, TrainableTrajectory, TrainTask

pytestmark = [
    pytest.mark.slow,
    # TRL and what it imports warn about settings that this test does not touch.
    pytest.mark.filterwarnings("ignore"),
]

NUM_STEPS = 3
LEARNING_RATE = 1e-3
VOCABULARY = 128

CASES: dict[str, tuple[dict, dict]] = {
    "grpo": ({}, {"loss_type": "dapo"}),
    "grpo by trajectory": ({"normalisation": "trajectory"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"preset": "dr_grpo"}, {"loss_type": "dr_grpo", "max_completion_length": 1024}),
    "dapo": ({"preset": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        {"preset": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        | {"epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": ({"preset": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "dual clip": ({"clip": "dual", "dual_clip": 1.3}, {"loss_type": "dapo", "delta": 1.3}),
    "kl": (
        {"beta": 0.2},
        {"loss_type": "dapo", "beta": 0.2, "use_bias_correction_kl": False},
    ),
}
"""Ours and TRL's settings of the same loss."""


def make_batch(policy: Policy) -> Batch:
    """Three groups with prompts of different length and completions of different length."""
    rng = random.Random(0)

    def draw(low: int, high: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(low, high))]

    groups = []
    for _ in range(3):
        prompt = draw(10, 30)
        trajectories = []
        for _ in range(4):
            token_ids = prompt + draw(3, 20)
            own = [0.0, *policy.row_logprobs(token_ids).tolist()]
            logprobs = [
                value + rng.uniform(-0.3, 0.3) if index >= len(prompt) else None
                for index, value in enumerate(own)
            ]
            trajectories.append(
                TrainableTrajectory(
                    reward=rng.random(), rows=[Row(token_ids=token_ids, logprobs=logprobs)]
                )
            )
        groups.append(TrainableGroup(trajectories=trajectories))
    return Batch(groups=groups)


def make_inputs(policy: Policy, batch: Batch, config: TrainConfig) -> dict[str, torch.Tensor]:
    """The batch as TRL pads it: prompts on the left, completions on the right."""
    rows = [each.rows[0] for group in batch.groups for each in group.trajectories]
    advantages = [
        value
        for group in batch.groups
        for value in group_advantages([each.reward for each in group.trajectories], config) or []
    ]
    firsts = [sum(value is None for value in row.logprobs) for row in rows]
    prompts = [row.token_ids[:first] for row, first in zip(rows, firsts, strict=True)]
    completions = [row.token_ids[first:] for row, first in zip(rows, firsts, strict=True)]
    olds = [
        [value for value in row.logprobs[first:] if value is not None]
        for row, first in zip(rows, firsts, strict=True)
    ]
    with torch.no_grad(), policy.model.disable_adapter():
        references = [
            policy.row_logprobs(row.token_ids)[first - 1 :].tolist()
            for row, first in zip(rows, firsts, strict=True)
        ]
    inputs = {
        "prompt_ids": pad(prompts, left=True),
        "prompt_mask": pad([[1] * len(each) for each in prompts], left=True),
        "completion_ids": pad(completions),
        "completion_mask": pad([[1] * len(each) for each in completions]),
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": pad(olds),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
    }
    if config.beta:
        inputs["ref_per_token_logps"] = pad(references)
    return inputs


def pad(rows: list[list], left: bool = False) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor(
        [
            [0] * (longest - len(row)) + row if left else row + [0] * (longest - len(row))
            for row in rows
        ]
    )


@pytest.mark.parametrize("name", list(CASES))
def test_three_steps_equal_those_of_trl(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, name: str
) -> None:
    given, theirs = CASES[name]
    config = TrainConfig(**given, learning_rate=LEARNING_RATE, max_grad_norm=0.5)
    policy.load_adapter(LoRAConfig(), adapter_dir)
    batch = make_batch(policy)
    inputs = make_inputs(policy, batch, config)
    norms, weights = run_trl(base_dir, adapter_dir, tmp_path, inputs, theirs)

    folder = adapter_dir
    for index in range(NUM_STEPS):
        out = tmp_path / str(index)
        task = TrainTask(
            lora=LoRAConfig(), in_dir=str(folder), out_dir=str(out), config=config, batch=batch
        )
        done = train(policy, task, 150, lambda _: None)
        assert done.metrics["loss/grad_norm"] == pytest.approx(norms[index], rel=1e-4)
        folder = out
    for key, tensor in load_file(folder / ADAPTER_FILE).items():
        assert float((tensor - weights[key]).norm()) <= 1e-4 * float(weights[key].norm()), key


def run_trl(
    base_dir: Path,
    adapter_dir: Path,
    folder: Path,
    inputs: dict[str, torch.Tensor],
    settings: dict[str, Any],
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms of three steps, and the adapter after them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Here, because it takes seconds and belongs to slow tests only.
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

    class SameTokens(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return inputs

    class Norms(TrainerCallback):
        values: list[float]

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "grad_norm" in logs:
                norms.append(float(logs["grad_norm"]))

    norms: list[float] = []
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True)
    words = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t1")),
        unk_token="t1",
        pad_token="t0",
        eos_token="t2",
    )
    arguments = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": 12,
        "num_generations": 4,
        "max_steps": NUM_STEPS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.5,
        "beta": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    trainer = SameTokens(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**arguments | settings),
        train_dataset=Dataset.from_list([{"prompt": "t5"}] * 12),
        processing_class=tokenizer,
        callbacks=[Norms()],
    )
    trainer.train()
    weights = {
        key.replace(".default", ""): each.detach()
        for key, each in model.named_parameters()
        if each.requires_grad
    }
    return norms, weights
