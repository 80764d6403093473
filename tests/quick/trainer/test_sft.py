"""Supervised training: three optimizer steps of one job are those of TRL 1.16's SFTTrainer on the same tokens, and the
gradient of one is that of the cross-entropy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.trainer_messages import (
    Batch,
    MismatchLimits,
    SampledSpan,
    TrainTask,
)
from art_server.trainer.job import train
from art_server.trainer.policy import Policy
from tests.makers.sft_examples import BATCH_SIZE, NUM_STEPS, RATES, make_batch, make_examples, run


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_a_step_is_that_of_the_cross_entropy(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, shared: bool
) -> None:
    examples = make_examples(shared)
    done = run(policy, adapter_dir, tmp_path / "out", make_batch(examples), learning_rate=1e-3)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True)
    sums, num_right, num = torch.zeros(()), 0, 0
    for prompt, answer in examples:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        targets = torch.tensor(answer)
        sums = sums + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        num_right += int((logits.argmax(-1) == targets).sum())
        num += len(answer)
    loss = sums / num
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert done.metrics["loss/train"] == pytest.approx(loss.item(), rel=1e-5)
    assert done.metrics["loss/token_accuracy"] == pytest.approx(num_right / num)
    assert done.metrics["loss/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert done.metrics["loss/corrected_token_fraction"] == 0.0
    assert (done.metrics["data/step_computed_tokens"] < done.metrics["data/step_row_tokens"]) == (shared)


def test_steps_take_the_groups_in_their_order_with_their_rates(
    policy: Policy, adapter_dir: Path, tmp_path: Path
) -> None:
    """One job of three steps is three jobs of one step."""
    examples = make_examples()
    together = run(
        policy,
        adapter_dir,
        tmp_path / "together",
        make_batch(examples),
        learning_rate=RATES,
        batch_size=BATCH_SIZE,
    )
    assert together.metrics["data/step_num_gradient_steps"] == NUM_STEPS
    folder, losses = adapter_dir, []
    for index, rate in enumerate(RATES):
        part = make_batch(examples[BATCH_SIZE * index : BATCH_SIZE * (index + 1)])
        out = tmp_path / str(index)
        losses.append(run(policy, folder, out, part, learning_rate=rate).metrics["loss/train"])
        folder = out
    assert together.metrics["loss/train"] == pytest.approx(sum(losses) / NUM_STEPS, rel=1e-6)
    weights = (tmp_path / "together" / "adapter_model.safetensors").read_bytes()
    assert (folder / "adapter_model.safetensors").read_bytes() == weights


def test_groups_that_are_not_trained_leave_their_places_and_rates_empty(
    policy: Policy, adapter_dir: Path, tmp_path: Path
) -> None:
    """The first batch keeps one group, the second none: the third has its own groups and its own rate."""
    batch = make_batch(make_examples()[: 3 * BATCH_SIZE])
    groups = [group.model_copy(update={"number": n}) for n, group in enumerate(batch.groups)]
    kept = [groups[0], *groups[2 * BATCH_SIZE :]]
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE}
    left = batch.model_copy(update={"groups": kept})
    done = run(policy, adapter_dir, tmp_path / "left", left, learning_rate=RATES, **settings)
    assert done.metrics["data/step_num_gradient_steps"] == 2
    first = batch.model_copy(update={"groups": kept[:1]})
    run(policy, adapter_dir, tmp_path / "1", first, learning_rate=RATES[0])
    last = batch.model_copy(update={"groups": kept[1:]})
    run(policy, tmp_path / "1", tmp_path / "2", last, learning_rate=RATES[2])
    weights = (tmp_path / "left" / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "2" / "adapter_model.safetensors").read_bytes() == weights


def test_each_pass_has_its_own_rates_if_the_last_groups_are_not_trained(
    policy: Policy, adapter_dir: Path, tmp_path: Path
) -> None:
    """Of two batches the second is left out: the second pass has the third rate."""
    batch = make_batch(make_examples()[:BATCH_SIZE])
    groups = [group.model_copy(update={"number": n}) for n, group in enumerate(batch.groups)]
    left = Batch(groups=groups, num_groups=2 * BATCH_SIZE)
    rates = [*RATES, 1e-4]
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "passes": 2}
    run(policy, adapter_dir, tmp_path / "left", left, learning_rate=rates, **settings)
    run(policy, adapter_dir, tmp_path / "1", batch, learning_rate=rates[0])
    run(policy, tmp_path / "1", tmp_path / "2", batch, learning_rate=rates[2])
    weights = (tmp_path / "left" / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "2" / "adapter_model.safetensors").read_bytes() == weights


def test_the_loss_of_held_out_examples_is_of_the_new_weights_and_trains_nothing(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path
) -> None:
    examples = make_examples()
    batch, held_out = make_batch(examples[BATCH_SIZE:]), make_batch(examples[:BATCH_SIZE])
    settings: dict[str, Any] = {"learning_rate": 1e-2, "batch_size": BATCH_SIZE}
    plain = run(policy, adapter_dir, tmp_path / "plain", batch, **settings)
    both = batch.model_copy(update={"held_out": held_out.groups})
    done = run(policy, adapter_dir, tmp_path / "out", both, **settings)
    assert done.losses == plain.losses and len(done.losses) == NUM_STEPS - 1 and "val/loss" not in plain.metrics
    assert done.metrics["loss/train"] == pytest.approx(sum(done.losses) / len(done.losses))
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("plain", "out")]
    assert weights[0] == weights[1]
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    loss, num = 0.0, 0
    with torch.no_grad():
        for prompt, answer in examples[:BATCH_SIZE]:
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            loss += float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
            num += len(answer)
    assert done.metrics["val/loss"] == pytest.approx(loss / num, rel=1e-4)


def test_tokens_of_weight_zero_are_context(policy: Policy, adapter_dir: Path, tmp_path: Path) -> None:
    """Neither the loss nor its mean knows them: training on the last message is independent of earlier ones' length."""
    examples = make_examples()[:BATCH_SIZE]
    earlier = 5
    batch = make_batch([(prompt[earlier:], prompt[:earlier] + answer) for prompt, answer in examples])
    for group, (prompt, _) in zip(batch.groups, examples, strict=True):
        (sequence,) = group.trajectories[0].sequences
        first = len(prompt) - earlier
        sequence.advantages.update(dict.fromkeys(range(first, first + earlier), 0.0))
    expected = make_batch([(prompt[earlier:] + prompt[:earlier], answer) for prompt, answer in examples])
    done = [
        run(policy, adapter_dir, tmp_path / str(index), variant, learning_rate=1e-3)
        for index, variant in enumerate((batch, expected))
    ]
    for name in ("loss/train", "loss/token_accuracy", "loss/grad_norm", "loss/entropy"):
        assert done[0].metrics[name] == pytest.approx(done[1].metrics[name], rel=1e-6)


def test_the_gap_is_judged_before_the_weights_change(policy: Policy, adapter_dir: Path, tmp_path: Path) -> None:
    """SFT on answers that the policy itself sampled, in three optimizer steps at a high rate."""
    examples = make_examples()
    batch = make_batch(examples)
    for group in batch.groups:
        (sequence,) = group.trajectories[0].sequences
        first = sequence.recompute[0]
        policy.load_adapter(LoRAConfig(), adapter_dir)
        of_policy = policy.sequence_logprobs(sequence.token_ids, [*range(first - 1, len(sequence.token_ids) - 1)])
        sequence.logprobs[first:] = of_policy.tolist()
        sequence.recompute.clear()
        sequence.spans.append(SampledSpan(start=first, stop=len(sequence.token_ids), step=0))
    limits = MismatchLimits(high=1e-4, wrong=1e-3, largest=None)
    task = TrainTask(
        lora=LoRAConfig(),
        in_dir=str(adapter_dir),
        out_dir=str(tmp_path / "out"),
        config=TrainConfig(objective="likelihood", learning_rate=1e-2, batch_size=BATCH_SIZE, sampling="raw"),
        batch=batch,
        mismatch_limits=limits,
    )
    done = train(policy, task, 150, lambda _: None)
    assert done.metrics["data/step_num_gradient_steps"] == NUM_STEPS and not done.notes
    assert done.metrics["loss/logprob_gap_max"] < 1e-4
    assert done.metrics["loss/importance_ratio_p99"] == pytest.approx(1, abs=1e-4)
