"""The probe of a step: what the trainer scores, and that it changes nothing."""

import time
from pathlib import Path

import pytest
import torch
from peft.helpers import rescale_adapter_scale
from safetensors.torch import load_file

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.same_policy import NUM_SIGMAS_OF_EFFECT, effect_ratio, find_fault, mismatch_limits
from art_server.shared.trainer_messages import (
    Batch,
    Done,
    MismatchLimits,
    Probe,
    SampledSpan,
    TrainTask,
)
from art_server.store.adapter_layers import layer_kind
from art_server.trainer.batches import make_train_batch
from art_server.trainer.job import train
from art_server.trainer.policy import ADAPTER_FILE, Policy
from art_server.trainer.probe import (
    NUM_TOKENS,
    SHARE,
    STARTED_AT,
    STEPS_OF_MOVEMENT,
    STEPS_OF_TOKENS,
    choose_tokens,
    is_due,
    write_layer_probes,
)
from tests.makers.first_steps import write_first_checkpoint

WIDE = MismatchLimits(high=100.0, wrong=100.0)
"""The batches' log-probabilities are random numbers."""


def job(policy: Policy, start: Path, out: Path, batch: Batch, probe: Probe | None = None, **options) -> Done:
    task = TrainTask(
        in_dir=str(start),
        out_dir=str(out),
        config=TrainConfig(learning_rate=1e-3),
        batch=batch,
        probe=probe,
        **({"mismatch_limits": WIDE, "lora": LoRAConfig()} | options),
    )
    return train(policy, task, 4096, lambda _: None)


def test_a_probe_holds_what_the_new_step_and_its_base_compute(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    limits = MismatchLimits(high=1e-4, wrong=100.0)
    done = job(policy, adapter_dir, tmp_path / "1", make_batch(0), mismatch_limits=limits)
    probe = done.probe
    assert probe is not None and 2 <= len(probe.token_ids) <= NUM_TOKENS + 1
    before = Policy(policy.base_model, torch.float32)
    before.load_adapter(LoRAConfig(), adapter_dir)
    old = before.sequence_logprobs(probe.token_ids)
    policy.load_adapter(LoRAConfig(), tmp_path / "1")
    new = policy.sequence_logprobs(probe.token_ids)
    with policy.model.disable_adapter():
        base = policy.sequence_logprobs(probe.token_ids)
    assert probe.logprobs == pytest.approx(new.tolist(), abs=1e-5)
    assert probe.base_logprobs == pytest.approx(base.tolist(), abs=1e-5)
    assert probe.moved == [pytest.approx(float((new - old).square().mean().sqrt()), abs=1e-5)]
    assert probe.rounding == 0 and probe.factor == 1 and probe.scaled_logprobs == []
    assert done.metrics["loss/probe_moved"] == probe.moved[0] > 0


def test_an_effect_near_rounding_is_scored_at_a_multiple_of_alpha(policy: Policy, tmp_path: Path, make_batch) -> None:
    limits = mismatch_limits(("bfloat16", "float32"))
    assert limits is not None
    limits = limits.model_copy(update={"wrong": 100.0})
    write_first_checkpoint(policy.base_model, LoRAConfig(), 0, tmp_path / "0")
    probe = job(policy, tmp_path / "0", tmp_path / "1", make_batch(0), mismatch_limits=limits).probe
    assert probe is not None and probe.rounding > 0 and probe.factor > 1
    policy.load_adapter(LoRAConfig(), tmp_path / "1")
    with rescale_adapter_scale(policy.model, probe.factor):
        scaled = policy.sequence_logprobs(probe.token_ids)
    assert probe.scaled_logprobs == pytest.approx(scaled.tolist(), abs=1e-5)
    effect = (scaled - torch.tensor(probe.base_logprobs)).square().mean().sqrt()
    assert effect >= NUM_SIGMAS_OF_EFFECT * probe.rounding


def test_the_measured_rounding_is_that_of_the_number_type(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    """Against the same base computed in 16 bits by torch."""
    for name in ("bfloat16", "float16"):
        limits = mismatch_limits((name, "float32"))
        assert limits is not None
        wide = limits.model_copy(update={"wrong": 100.0})
        rounded = Policy(str(base_dir), getattr(torch, name))
        ratios = []
        for seed in range(4):
            out = tmp_path / f"{name}{seed}"
            probe = job(policy, adapter_dir, out, make_batch(seed), mismatch_limits=wide).probe
            assert probe is not None
            rounded.load_adapter(LoRAConfig(), out)
            gaps = rounded.sequence_logprobs(probe.token_ids) - torch.tensor(probe.logprobs)
            ratios.append(float(gaps.square().mean().sqrt()) / probe.rounding)
        assert 0.3 < sum(ratios) / len(ratios) < 2, ratios


def test_a_probe_changes_no_weight(policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch) -> None:
    limits = mismatch_limits(("bfloat16", "bfloat16"))
    assert limits is not None
    wide = limits.model_copy(update={"wrong": 100.0})
    job(policy, adapter_dir, tmp_path / "with", make_batch(1), mismatch_limits=wide)
    none = job(policy, adapter_dir, tmp_path / "without", make_batch(1), mismatch_limits=None)
    assert none.probe is None
    weights = [(tmp_path / name / ADAPTER_FILE).read_bytes() for name in ("with", "without")]
    assert weights[0] == weights[1]


def test_tokens_are_used_again_and_chosen_anew_when_they_are_old(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    first = job(policy, adapter_dir, tmp_path / "1", make_batch(0)).probe
    second = job(policy, tmp_path / "1", tmp_path / "2", make_batch(5), first).probe
    assert first is not None and second is not None
    assert second.token_ids == first.token_ids and second.age == 2
    assert second.base_logprobs == first.base_logprobs and len(second.moved) == 2
    old = second.model_copy(update={"age": STEPS_OF_TOKENS, "moved": [0.5] * STEPS_OF_MOVEMENT, "made_at": 0.0})
    third = job(policy, tmp_path / "2", tmp_path / "3", make_batch(5), old).probe
    assert third is not None and third.token_ids != first.token_ids and third.age == 1
    assert len(third.moved) == STEPS_OF_MOVEMENT and third.moved[:-1] == [0.5] * 63


def test_a_probe_is_skipped_while_it_would_cost_too_much_of_the_time(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    assert is_due(None) and is_due(Probe(moved=[0.0] * 9))
    first = job(policy, adapter_dir, tmp_path / "1", make_batch(0)).probe
    assert first is not None and first.seconds > 0 and first.is_of_step and is_due(first)
    dear = first.model_copy(update={"moved": [0.1, 0.2], "seconds": 1e6})
    assert not is_due(dear)
    assert is_due(dear.model_copy(update={"made_at": STARTED_AT - 1}))
    assert is_due(dear.model_copy(update={"seconds": SHARE * (time.time() - dear.made_at)}))
    assert is_due(dear.model_copy(update={"made_at": dear.made_at + 1e9}))  # the clock went back

    done = job(policy, tmp_path / "1", tmp_path / "2", make_batch(5), dear)
    skipped = done.probe
    assert skipped is not None and skipped.num_skipped == 1 and not skipped.is_of_step
    assert skipped.moved == [0.1, 0.2, 0.2] and skipped.logprobs == first.logprobs
    assert not {"time/step_probe_s", "loss/probe_moved"} & set(done.metrics)

    cheap = skipped.model_copy(update={"seconds": 0.0})
    next_one = job(policy, tmp_path / "2", tmp_path / "3", make_batch(6), cheap).probe
    assert next_one is not None and next_one.is_of_step and next_one.token_ids == first.token_ids
    moved = torch.tensor(next_one.logprobs) - torch.tensor(first.logprobs)
    assert next_one.moved[-1] == pytest.approx(float(moved.square().mean().sqrt()))


def test_a_job_with_tokens_of_earlier_steps_has_a_probe_whatever_it_costs(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    """A later job's stale tokens are judged by the movement of this step: an older one may be much smaller."""
    first = job(policy, adapter_dir, tmp_path / "1", make_batch(0)).probe
    assert first is not None
    dear = first.model_copy(update={"moved": [1e-9, 1e-9], "seconds": 1e6})
    batch = make_batch(5)
    for group in batch.groups:
        for trajectory in group.trajectories:
            for sequence in trajectory.sequences:
                sequence.spans.append(SampledSpan(start=0, stop=len(sequence.token_ids), step=0))
    assert not is_due(dear)
    done = job(policy, tmp_path / "1", tmp_path / "2", batch, dear, start_step=1)
    assert done.probe is not None and done.probe.is_of_step
    assert done.metrics["loss/probe_moved"] == done.probe.moved[-1] > 1e-6


def test_a_step_without_signal_keeps_the_probe_and_has_not_moved(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    first = job(policy, adapter_dir, tmp_path / "1", make_batch(0)).probe
    same = job(policy, tmp_path / "1", tmp_path / "2", Batch(groups=[]), first).probe
    assert first is not None and same == first.model_copy(update={"moved": [*first.moved, 0.0]})
    assert job(policy, adapter_dir, tmp_path / "3", Batch(groups=[])).probe == Probe(moved=[0.0])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_the_tokens_are_those_that_the_update_moves_most(make_batch) -> None:
    sequences = make_train_batch(make_batch(3)).sequences
    chosen = choose_tokens(sequences)
    assert any(chosen == [*sequence.token_ids[-NUM_TOKENS:], sequence.targets[-1]] for sequence in sequences)


def test_each_kind_of_layer_has_an_adapter_of_its_own_and_a_probe(policy: Policy, tmp_path: Path) -> None:
    limits = mismatch_limits(("float32", "float32"))
    assert limits is not None
    probes = write_layer_probes(policy, LoRAConfig(), tmp_path, limits)
    mlp = {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert set(probes) == {f"self_attn.{part}_proj" for part in "qkvo"} | mlp
    assert not any(bool(parameter.any()) for name, parameter in policy.parameters.items() if ".lora_B." in name)
    for kind, probe in probes.items():
        policy.load_adapter(LoRAConfig(), tmp_path / kind)
        changed = {
            layer_kind(name.partition(".lora_")[0])
            for name, parameter in policy.parameters.items()
            if ".lora_B." in name and bool(parameter.any())
        }
        assert changed == {kind}
        with rescale_adapter_scale(policy.model, probe.factor):
            scaled = policy.sequence_logprobs(probe.token_ids).tolist()
        assert (probe.scaled_logprobs or probe.logprobs) == pytest.approx(scaled, abs=1e-5)
        assert effect_ratio(probe, scaled, limits) == pytest.approx(1, abs=1e-3)
        assert find_fault(probe, probe.base_logprobs, probe.base_logprobs, limits), "a lost adapter"


def test_a_lost_layer_is_not_trained(policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch) -> None:
    job(policy, adapter_dir, tmp_path / "1", make_batch(0), lost_layers=["self_attn.k_proj"])
    before, after = (load_file(folder / ADAPTER_FILE) for folder in (adapter_dir, tmp_path / "1"))
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    # A fresh adapter's A has no gradient: its B is zero.
    assert {name for name in after if ".k_proj." in name} <= same
    assert not [name for name in same if ".lora_B." in name and ".k_proj." not in name]
    kinds = {layer_kind(name.partition(".lora_")[0]) for name in policy.parameters}
    with pytest.raises(ValueError, match="target_modules"):
        job(policy, adapter_dir, tmp_path / "2", make_batch(0), lost_layers=sorted(kinds))
