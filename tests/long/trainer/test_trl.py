"""The same steps as TRL 1.16's GRPOTrainer on the same tokens, advantages and log-probabilities of the sampler."""

import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, TrainerCallback

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.advantages import group_advantages
from art_server.shared.trainer_messages import (
    Batch,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
)
from art_server.trainer.job import train
from art_server.trainer.policy import Policy
from tests.long.trainer.compared import assert_same_weights, make_tokenizer

# TRL and what it imports warn about settings that this test does not touch.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_STEPS = 3
LEARNING_RATE = 1e-3
VOCABULARY = 128

TO_SAMPLED: dict[str, tuple[dict, dict]] = {
    "grpo": ({}, {"loss_type": "dapo"}),
    "grpo by trajectory": ({"normalisation": "trajectory"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"preset": "dr_grpo"}, {"loss_type": "dr_grpo", "max_completion_length": 1024}),
    "dapo": ({"preset": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        {"preset": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"} | {"epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": ({"preset": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "dual clip": ({"clip": "dual", "dual_clip": 1.3}, {"loss_type": "dapo", "delta": 1.3}),
    "kl": ({"beta": 0.2}, {"loss_type": "dapo", "beta": 0.2, "use_bias_correction_kl": False}),
}
"""Ours and TRL's settings of the same loss. TRL's old policy is the sampler there, so that the clip bites."""

TRUNCATE = {"vllm_importance_sampling_mode": "token_truncate"}
MASK = {"vllm_importance_sampling_mode": "token_mask"}
CORRECTED: dict[str, tuple[dict, dict]] = {
    "truncate": ({}, {"loss_type": "dapo", **TRUNCATE}),
    "mask": ({"correction": "mask"}, {"loss_type": "dapo", **MASK}),
    "gspo": (
        {"preset": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **TRUNCATE}
        | {"epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": ({"preset": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0, **TRUNCATE}),
    "kl": ({"beta": 0.2}, {"loss_type": "dapo", "beta": 0.2, "use_bias_correction_kl": False, **TRUNCATE}),
}
"""The old policy is the trainer's at the start of the job; the sampler is weighed."""

WITH_KL: dict[str, tuple[dict, dict]] = {
    "tokens": ({}, {"loss_type": "dapo"}),
    "trajectory": ({"normalisation": "trajectory"}, {"loss_type": "grpo"}),
    "constant": ({"preset": "dr_grpo"}, {"loss_type": "dr_grpo", "max_completion_length": 1024}),
}
"""Each normalisation, for batches with groups of equal rewards."""

CAP = 2.0
NOISE = 1.5
"""Sampled log-probabilities differ by up to this much, so that ratios reach exp(1.5) = 4.5 and the cap bites."""

MakeInputs = Callable[[torch.nn.Module], dict[str, torch.Tensor]]


def make_batch(policy: Policy, noise: float = 0.3, num_dead: int = 0) -> Batch:
    """Three groups with prompts of different length and completions of different length. Rewards are equal in
    `num_dead` of them."""
    rng = random.Random(0)

    def draw(low: int, high: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(low, high))]

    groups = []
    for number in range(3):
        prompt = draw(10, 30)
        trajectories = []
        for _ in range(4):
            token_ids = prompt + draw(3, 20)
            own = [0.0, *policy.sequence_logprobs(token_ids).tolist()]
            logprobs = [
                value + rng.uniform(-noise, noise) if index >= len(prompt) else None for index, value in enumerate(own)
            ]
            trajectories.append(
                TrainableTrajectory(
                    reward=1.0 if number < num_dead else rng.random(),
                    sequences=[TokenSequence(token_ids=token_ids, logprobs=logprobs)],
                )
            )
        groups.append(TrainableGroup(trajectories=trajectories))
    return Batch(groups=groups)


def make_inputs(policy: Policy, batch: Batch, config: TrainConfig) -> dict[str, torch.Tensor]:
    """The batch as TRL pads it: prompts on the left, completions on the right."""
    sequences = [trajectory.sequences[0] for group in batch.groups for trajectory in group.trajectories]
    advantages = [
        value
        for group in batch.groups
        for value in group_advantages([trajectory.reward for trajectory in group.trajectories], config)
        or [0.0] * len(group.trajectories)
    ]
    firsts = [sum(value is None for value in sequence.logprobs) for sequence in sequences]
    prompts = [sequence.token_ids[:first] for sequence, first in zip(sequences, firsts, strict=True)]
    completions = [sequence.token_ids[first:] for sequence, first in zip(sequences, firsts, strict=True)]
    olds = [
        [value for value in sequence.logprobs[first:] if value is not None]
        for sequence, first in zip(sequences, firsts, strict=True)
    ]
    with torch.no_grad(), policy.model.disable_adapter():
        references = [
            policy.sequence_logprobs(sequence.token_ids)[first - 1 :].tolist()
            for sequence, first in zip(sequences, firsts, strict=True)
        ]
    inputs = {
        "prompt_ids": pad(prompts, left=True),
        "prompt_mask": pad([[1] * len(prompt) for prompt in prompts], left=True),
        "completion_ids": pad(completions),
        "completion_mask": pad([[1] * len(completion) for completion in completions]),
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": pad(olds),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
    }
    if config.beta:
        inputs["ref_per_token_logps"] = pad(references)
    return inputs


def pad(sequences: list[list], left: bool = False) -> torch.Tensor:
    longest = max(map(len, sequences))
    return torch.tensor(
        [
            [0] * (longest - len(sequence)) + sequence if left else sequence + [0] * (longest - len(sequence))
            for sequence in sequences
        ]
    )


def correcting(batch: Batch, inputs: dict[str, torch.Tensor], mode: str, is_one_job: bool) -> MakeInputs:
    """TRL's inputs with the old policy's log-probabilities, and with their truncated or masked ratio to the sampler's:
    those of each step's start, or of the first step's."""
    sequences = [trajectory.sequences[0] for group in batch.groups for trajectory in group.trajectories]
    sampled = inputs["old_per_token_logps"]
    corrected: list[dict[str, torch.Tensor]] = []

    def make(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        if not corrected or not is_one_job:
            olds = []
            for sequence in sequences:
                first = sum(value is None for value in sequence.logprobs)
                ids = torch.tensor([sequence.token_ids])
                with torch.no_grad():
                    logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
                own = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
                olds.append(own[first - 1 :].tolist())
            old = pad(olds)
            ratio = (old - sampled).exp()
            capped = ratio.clamp(max=CAP)
            if mode == "token_mask":
                capped = torch.where(ratio > CAP, 0.0, ratio)
            assert 0.1 < float((ratio > CAP).float().mean()) < 0.9
            corrected.append(inputs | {"old_per_token_logps": old, "importance_sampling_ratio": capped})
        return corrected[-1]

    return make


@pytest.mark.parametrize("name", list(CORRECTED))
def test_three_jobs_of_one_step_equal_trls_with_its_correction(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, name: str
) -> None:
    ours, theirs = CORRECTED[name]
    config = TrainConfig(**ours, learning_rate=LEARNING_RATE, max_grad_norm=0.5)
    policy.load_adapter(LoRAConfig(), adapter_dir)
    batch = make_batch(policy, NOISE)
    inputs = make_inputs(policy, batch, config)
    make = correcting(batch, inputs, theirs["vllm_importance_sampling_mode"], is_one_job=False)
    norms, weights = run_trl(base_dir, adapter_dir, tmp_path, make, theirs)
    run_ours_in_jobs(policy, adapter_dir, tmp_path, config, batch, norms, weights)


@pytest.mark.parametrize("name", list(CORRECTED))
def test_one_job_of_three_steps_equals_trls_with_a_fixed_old_policy(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, name: str
) -> None:
    ours, theirs = CORRECTED[name]
    config = TrainConfig(**ours, learning_rate=LEARNING_RATE, max_grad_norm=0.5, passes=NUM_STEPS)
    policy.load_adapter(LoRAConfig(), adapter_dir)
    batch = make_batch(policy, NOISE)
    inputs = make_inputs(policy, batch, config)
    make = correcting(batch, inputs, theirs["vllm_importance_sampling_mode"], is_one_job=True)
    norms, weights = run_trl(base_dir, adapter_dir, tmp_path, make, theirs)

    out = tmp_path / "out"
    task = TrainTask(lora=LoRAConfig(), in_dir=str(adapter_dir), out_dir=str(out), config=config, batch=batch)
    done = train(policy, task, 150, lambda _: None)
    assert done.metrics["loss/grad_norm"] == pytest.approx(sum(norms) / NUM_STEPS, rel=1e-4)
    assert done.metrics["data/step_num_gradient_steps"] == NUM_STEPS
    assert done.metrics["loss/policy_ratio_p99"] > 1 + 1e-3
    assert_same_weights(out, weights)


@pytest.mark.parametrize("name", list(TO_SAMPLED))
def test_three_steps_equal_those_of_trl_with_the_sampler_as_old_policy(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, name: str
) -> None:
    ours, theirs = TO_SAMPLED[name]
    config = TrainConfig(**ours, ratio_to="sampled", learning_rate=LEARNING_RATE, max_grad_norm=0.5)
    policy.load_adapter(LoRAConfig(), adapter_dir)
    batch = make_batch(policy)
    inputs = make_inputs(policy, batch, config)
    norms, weights = run_trl(base_dir, adapter_dir, tmp_path, lambda _: inputs, theirs)
    run_ours_in_jobs(policy, adapter_dir, tmp_path, config, batch, norms, weights)


@pytest.mark.parametrize("num_dead", [2, 3])
@pytest.mark.parametrize("name", list(WITH_KL))
def test_loss_with_kl_equals_that_of_trl_on_batches_with_dead_groups(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, name: str, num_dead: int
) -> None:
    ours, theirs = WITH_KL[name]
    config = TrainConfig(**ours, beta=0.2, ratio_to="sampled", learning_rate=LEARNING_RATE, max_grad_norm=0.5)
    policy.load_adapter(LoRAConfig(), adapter_dir)
    batch = make_batch(policy, num_dead=num_dead)
    inputs = make_inputs(policy, batch, config)
    settings = theirs | {"beta": 0.2, "use_bias_correction_kl": False}
    losses: list[float] = []
    norms, _ = run_trl(base_dir, adapter_dir, tmp_path, lambda _: inputs, settings, losses)
    # Not the weights: where all groups are dead, Adam enlarges the rounding of gradients near 0.
    own_losses = run_ours_in_jobs(policy, adapter_dir, tmp_path, config, batch, norms)
    assert own_losses == pytest.approx(losses, abs=1e-5)
    assert own_losses[0] == pytest.approx(losses[0], rel=1e-5)


def run_ours_in_jobs(
    policy: Policy,
    adapter_dir: Path,
    tmp_path: Path,
    config: TrainConfig,
    batch: Batch,
    norms: list[float],
    weights: dict[str, torch.Tensor] | None = None,
) -> list[float]:
    """Three jobs of one step each, with TRL's gradient norms and weights. Returns their losses."""
    folder, losses = adapter_dir, []
    for index in range(NUM_STEPS):
        out = tmp_path / str(index)
        task = TrainTask(lora=LoRAConfig(), in_dir=str(folder), out_dir=str(out), config=config, batch=batch)
        done = train(policy, task, 150, lambda _: None)
        assert done.metrics["loss/grad_norm"] == pytest.approx(norms[index], rel=1e-4)
        losses.append(done.metrics["loss/train"])
        folder = out
    if weights is not None:
        assert_same_weights(folder, weights)
    return losses


def run_trl(
    base_dir: Path,
    adapter_dir: Path,
    folder: Path,
    make_inputs: MakeInputs,
    settings: dict[str, Any],
    losses: list[float] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms of three steps, and the adapter after them. Adds the steps' losses to `losses`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Here, because it takes seconds and belongs to slow tests only.
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

    class SameTokens(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return make_inputs(cast(torch.nn.Module, self.model))  # there is one by now

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if losses is not None:
                losses.append(float(loss.detach()))
            return loss

    class Norms(TrainerCallback):
        values: list[float]

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "grad_norm" in logs:
                norms.append(float(logs["grad_norm"]))

    norms: list[float] = []
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True)
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
        processing_class=make_tokenizer(),
        callbacks=[Norms()],
    )
    if "vllm_importance_sampling_mode" in settings:
        trainer.use_vllm = True  # the argument would start vLLM
    trainer.train()
    weights = {
        key.replace(".default", ""): parameter.detach()
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return norms, weights
