"""Supervised training: three optimizer steps of one job are those of TRL 1.16's SFTTrainer on the same tokens, and the
gradient of one is that of the cross-entropy."""

import os
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, TrainerCallback

from art_server.trainer.policy import Policy
from tests.long.trainer.compared import assert_same_weights, make_tokenizer
from tests.makers.sft_examples import BATCH_SIZE, MAX_GRAD_NORM, NUM_STEPS, RATES, make_batch, make_examples, run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_three_steps_are_those_of_trl(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, shared: bool
) -> None:
    examples = make_examples(shared)
    losses, norms, weights = run_trl(base_dir, adapter_dir, tmp_path, examples)
    folder = adapter_dir
    for index, rate in enumerate(RATES):
        part = make_batch(examples[BATCH_SIZE * index : BATCH_SIZE * (index + 1)])
        out = tmp_path / str(index)
        metrics = run(policy, folder, out, part, learning_rate=rate).metrics
        assert metrics["loss/train"] == pytest.approx(losses[index], abs=1e-5)
        assert metrics["loss/grad_norm"] == pytest.approx(norms[index], rel=1e-4)
        folder = out
    assert_same_weights(folder, weights)


def run_trl(
    base_dir: Path, adapter_dir: Path, folder: Path, examples: list[tuple[list[int], list[int]]]
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of three steps, and the adapter after them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Here, because it takes seconds and belongs to slow tests only.
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

    losses: list[float] = []
    norms: list[float] = []

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(cast(Any, train_dataset or self.train_dataset))

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            result = super().compute_loss(*arguments, **named)
            losses.append(float(result[0] if isinstance(result, tuple) else result))
            return result

    class Steps(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            for group in named["optimizer"].param_groups:
                group["lr"] = RATES[state.global_step]

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "grad_norm" in logs:
                norms.append(float(logs["grad_norm"]))

    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True)
    rows = [
        {"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)}
        for prompt, answer in examples
    ]
    trainer = InOrder(
        model=model,
        args=SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=NUM_STEPS,
            learning_rate=RATES[0],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            completion_only_loss=True,
            max_length=None,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
        callbacks=[Steps()],
    )
    trainer.train()
    weights = {
        key.replace(".default", ""): parameter.detach()
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return losses, norms, weights
