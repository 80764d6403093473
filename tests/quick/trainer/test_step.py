import base64
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file
from torch._inductor.exc import InductorError
from transformers import AutoModelForCausalLM, Gemma2Config

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.advantages import group_advantages, trained_positions
from art_server.shared.kept_set import pack_set
from art_server.shared.main_memory import main_memory
from art_server.shared.same_policy import GapTooLarge
from art_server.shared.trainer_messages import (
    Batch,
    BetweenSteps,
    Distribution,
    Done,
    MismatchLimits,
    Progress,
    SampledSpan,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
)
from art_server.trainer.attention import ForestAttention
from art_server.trainer.batches import MicroBatch, TrainSequence, make_train_batch
from art_server.trainer.checkpoint import OPTIMIZER_FILE
from art_server.trainer.job import train
from art_server.trainer.mini_batches import split_mini_batches
from art_server.trainer.policy import ADAPTER_FILE, Policy
from art_server.trainer.step import compute_gradient
from art_server.trainer.step_metrics import merge_steps
from art_server.trainer.token_budget import budget_key
from art_server.trainer.tree import MIN_SHARED_TOKENS, Forest
from tests.makers.first_steps import write_first_checkpoint

BUDGET = 4096


def step(
    policy: Policy,
    in_dir: Path,
    out_dir: Path,
    batch: Batch,
    config: TrainConfig,
    *,
    lora: LoRAConfig | None = None,
    budget: int = BUDGET,
    between_steps: BetweenSteps = "stay",
    optimizer_steps: int | None = None,
) -> Done:
    task = TrainTask(
        lora=lora or LoRAConfig(),
        in_dir=str(in_dir),
        out_dir=str(out_dir),
        config=config,
        batch=batch,
        optimizer_steps=optimizer_steps,
    )
    return train(policy, task, budget, lambda _: None, between_steps=between_steps)


def start(policy: Policy, folder: Path, lora: LoRAConfig | None = None, seed: int = 0) -> Path:
    write_first_checkpoint(policy.base_model, lora or LoRAConfig(), seed, folder)
    policy.load_adapter(lora or LoRAConfig(), folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Weights and optimizer state."""
    return {name: (folder / name).read_bytes() for name in (ADAPTER_FILE, OPTIMIZER_FILE)}


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in policy.parameters.items() if parameter.grad is not None}


@pytest.fixture(scope="module")
def plain(base_dir: Path, adapter_dir: Path) -> PeftModel:
    """The policy of `adapter_dir` in Hugging Face's own code."""
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True).eval()


def plain_loss_and_gradients(
    model: PeftModel, batch: Batch, config: TrainConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    """GRPO written sequence by sequence on plain logits, with autograd of the loss itself."""
    model.zero_grad()
    total, num_tokens = torch.zeros(()), 0
    for group in batch.groups:
        advantages = group_advantages([trajectory.reward for trajectory in group.trajectories])
        if advantages is None:
            if not config.beta:
                continue
            advantages = [0.0] * len(group.trajectories)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            for sequence in trajectory.sequences:
                ids = torch.tensor([sequence.token_ids])
                logprobs_TV = torch.log_softmax(model(input_ids=ids).logits[0], -1)
                reference_TV = logprobs_TV.detach()
                if config.beta:
                    with torch.no_grad(), model.disable_adapter():
                        reference_TV = torch.log_softmax(model(input_ids=ids).logits[0], -1)
                for index, sampled in enumerate(sequence.logprobs):
                    if sampled is None or index == 0:
                        continue
                    logprob = logprobs_TV[index - 1, sequence.token_ids[index]]
                    # The first pass: pi_old is pi_new, so only the weight is left of the two ratios.
                    weight = (logprob.detach() - sampled).exp().clamp(max=2.0)
                    ratio = (logprob - logprob.detach()).exp()
                    total = total - weight * ratio * advantage
                    difference = reference_TV[index - 1, sequence.token_ids[index]] - logprob
                    total = total + config.beta * (difference.exp() - difference - 1)
                    num_tokens += 1
    loss = total / num_tokens
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 150), beta=st.sampled_from([0.0, 0.3]))
def test_gradient_is_that_of_the_plain_loss_for_any_token_budget(
    policy: Policy,
    plain: PeftModel,
    adapter_dir: Path,
    tmp_path: Path,
    make_batch,
    seed: int,
    budget: int,
    beta: float,
) -> None:
    batch = near_policy(policy, adapter_dir, make_batch(seed))
    config = TrainConfig(beta=beta, max_grad_norm=1e9)
    done = step(policy, adapter_dir, tmp_path / "out", batch, config, budget=budget)
    loss, expected = plain_loss_and_gradients(plain, batch, config)

    assert done.metrics["loss/train"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
    got = gradients(policy)
    assert got.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-5 * largest)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    assert done.metrics["loss/grad_norm"] == pytest.approx(norm, rel=1e-4)


def near_policy(policy: Policy, adapter_dir: Path, batch: Batch, noise: float = 0.5) -> Batch:
    """The batch with sampled log-probabilities near the policy's own, on either side of each clip."""
    policy.load_adapter(LoRAConfig(), adapter_dir)
    rng = random.Random(0)

    def sampled(sequence: TokenSequence) -> TokenSequence:
        if len(sequence.token_ids) < 2:
            return sequence
        logprobs = [0.0, *policy.sequence_logprobs(sequence.token_ids).tolist()]
        return TokenSequence(
            token_ids=sequence.token_ids,
            logprobs=[
                None if value is None else logprobs[index] + rng.uniform(-noise, noise)
                for index, value in enumerate(sequence.logprobs)
            ],
        )

    return Batch(
        groups=[
            TrainableGroup(
                trajectories=[
                    TrainableTrajectory(
                        reward=trajectory.reward,
                        sequences=[sampled(sequence) for sequence in trajectory.sequences],
                    )
                    for trajectory in group.trajectories
                ]
            )
            for group in batch.groups
        ]
    )


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig(beta=0.1, kl_in="reward"),
        TrainConfig(beta=0.1, kl_in="advantage"),
    ],
    ids=["plain", "reward", "advantage"],
)
def test_dead_groups_change_neither_gradient_nor_metrics_of_the_loss(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch, config: TrainConfig
) -> None:
    live = make_batch(11)
    dead = [
        TrainableGroup(
            trajectories=[
                TrainableTrajectory(reward=1.0, sequences=trajectory.sequences) for trajectory in group.trajectories
            ]
        )
        for group in make_batch(12).groups
    ]
    alone = step(policy, adapter_dir, tmp_path / "alone", live, config)
    mixed = step(policy, adapter_dir, tmp_path / "mixed", Batch(groups=[*dead, *live.groups]), config)
    assert contents(tmp_path / "alone") == contents(tmp_path / "mixed")
    assert {key: value for key, value in alone.metrics.items() if key.startswith("loss/")} == {
        key: value for key, value in mixed.metrics.items() if key.startswith("loss/")
    }
    assert mixed.metrics["data/step_num_groups_submitted"] == 6
    assert mixed.metrics["data/step_num_groups_trainable"] == 3
    assert mixed.metrics["data/step_num_trajectories"] == 18


def with_equal_rewards(batch: Batch) -> Batch:
    groups = [
        TrainableGroup(
            trajectories=[trajectory.model_copy(update={"reward": 1.0}) for trajectory in group.trajectories]
        )
        for group in batch.groups
    ]
    return Batch(groups=groups)


@pytest.mark.parametrize(("num_live", "budget"), [(0, BUDGET), (2, 40)])
def test_kl_is_over_the_tokens_of_all_groups(
    policy: Policy,
    plain: PeftModel,
    adapter_dir: Path,
    tmp_path: Path,
    make_batch,
    num_live: int,
    budget: int,
) -> None:
    live, dead = make_batch(3, num_groups=2), with_equal_rewards(make_batch(4))
    batch = Batch(groups=[*live.groups[:num_live], *dead.groups])
    batch = near_policy(policy, adapter_dir, batch)
    config = TrainConfig(beta=0.3, max_grad_norm=1e9)
    done = step(policy, adapter_dir, tmp_path / "out", batch, config, budget=budget)
    loss, expected = plain_loss_and_gradients(plain, batch, config)
    assert done.metrics["loss/train"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5 * largest)
    assert not done.unchanged
    assert done.metrics["data/step_num_groups_trainable"] == num_live
    assert done.metrics["data/step_num_groups_dead"] == 3

    policy.load_adapter(LoRAConfig(), adapter_dir)
    pulls = [
        kl_of(policy, sequence)
        for group in batch.groups
        for trajectory in group.trajectories
        for sequence in trajectory.sequences
    ]
    mean = float(torch.cat(pulls).mean())
    assert done.metrics["loss/kl_policy_ref"] == pytest.approx(mean, rel=1e-4)


def kl_of(policy: Policy, sequence: TokenSequence) -> torch.Tensor:
    """k3 at the sampled tokens of a sequence."""
    own = policy.sequence_logprobs(sequence.token_ids)
    with torch.no_grad(), policy.model.disable_adapter():
        reference = policy.sequence_logprobs(sequence.token_ids)
    differences = (reference - own).detach()
    kl = differences.exp() - differences - 1
    return kl[[index - 1 for index in trained_positions(sequence)]]


@pytest.mark.parametrize(
    ("normalisation", "ratio"), [("tokens", "token"), ("trajectory", "sequence"), ("constant", "token")]
)
def test_groups_without_signal_weigh_the_kl_term_as_any_other(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch, normalisation: Any, ratio: Any
) -> None:
    """The gradient is that of the same batch with the policy's term of the dead groups taken away by hand: their
    advantages are given as 0, and a token of a further group has an advantage that no gradient can see."""
    config = TrainConfig(beta=0.3, max_grad_norm=1e9, normalisation=normalisation, ratio=ratio)
    live, dead = make_batch(5).groups, with_equal_rewards(make_batch(6)).groups
    step(policy, adapter_dir, tmp_path / "both", Batch(groups=[*live, *dead]), config)
    both = gradients(policy)
    zeros = [
        TrainableGroup(
            trajectories=[
                TrainableTrajectory(
                    reward=index,
                    sequences=[
                        sequence.model_copy(update={"advantages": dict.fromkeys(trained_positions(sequence), 0.0)})
                        for sequence in trajectory.sequences
                    ],
                )
                for index, trajectory in enumerate(group.trajectories)
            ]
        )
        for group in dead
    ]
    # One group with the live and the dead trajectories, whose advantages are given: live by any rule.
    weighted = [
        trajectory.model_copy(
            update={
                "sequences": [
                    sequence.model_copy(update={"advantages": dict.fromkeys(trained_positions(sequence), advantage)})
                    for sequence in trajectory.sequences
                ]
            }
        )
        for group in live
        for trajectory, advantage in zip(
            group.trajectories,
            group_advantages([trajectory.reward for trajectory in group.trajectories]) or [],
            strict=True,
        )
    ]
    merged = TrainableGroup(
        trajectories=[*weighted, *(trajectory for group in zeros for trajectory in group.trajectories)]
    )
    step(policy, adapter_dir, tmp_path / "merged", Batch(groups=[merged]), config)
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, both[name], rtol=1e-4, atol=1e-7)


def test_a_collapsed_policy_returns_towards_the_reference(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path
) -> None:
    """All rewards are equal, so that only KL is left. The exact divergence falls over the policy's own samples."""
    ids = torch.tensor([[3, 4, 5]] * 16)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model = adapted(base_dir, adapter_dir)
        for _ in range(12):
            following = model(input_ids=ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, following.multinomial(1, generator=chance)], -1)
        own = model(input_ids=ids).logits.log_softmax(-1)
    sampled = own[:, :-1].gather(-1, ids[:, 1:, None])[:, 2:, 0]
    trajectories = [
        TrainableTrajectory(
            reward=1.0,
            sequences=[TokenSequence(token_ids=row, logprobs=[None, None, None, *logprobs])],
        )
        for row, logprobs in zip(ids.tolist(), sampled.tolist(), strict=True)
    ]
    batch = Batch(groups=[TrainableGroup(trajectories=trajectories)])

    def divergence(folder: Path) -> float:
        with torch.no_grad():
            model = adapted(base_dir, folder)
            own = model(input_ids=ids).logits[:, 2:-1].log_softmax(-1)
            with model.disable_adapter():
                reference = model(input_ids=ids).logits[:, 2:-1].log_softmax(-1)
        return float((own.exp() * (own - reference)).sum(-1).mean())

    config = TrainConfig(beta=0.1, learning_rate=1e-3)
    folder, seen = adapter_dir, []
    for index in range(5):
        done = step(policy, folder, tmp_path / str(index), batch, config)
        folder = tmp_path / str(index)
        seen.append(done.metrics["loss/kl_policy_ref"])
    before, after = divergence(adapter_dir), divergence(folder)
    assert seen[-1] < 0.7 * seen[0] and after < 0.7 * before, (seen, before, after)


def adapted(base_dir: Path, folder: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(folder)).eval()


def test_an_entropy_bonus_acts_on_groups_without_signal(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    batch = near_policy(policy, adapter_dir, with_equal_rewards(make_batch(8)))
    config = TrainConfig(entropy_bonus=0.1, learning_rate=3e-3)
    folder, entropies = adapter_dir, []
    for index in range(8):
        done = step(policy, folder, tmp_path / str(index), batch, config)
        folder = tmp_path / str(index)
        entropies.append(done.metrics["loss/entropy"])
        assert done.metrics["loss/train"] == pytest.approx(-0.1 * entropies[-1], rel=1e-5)
    assert entropies[-1] > entropies[0] + 0.1, entropies


@pytest.mark.parametrize("kl_in", ["reward", "advantage"])
def test_kl_in_rewards_or_advantages_leaves_groups_without_signal_to_the_entropy(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch, kl_in: Any
) -> None:
    """Whether a group has signal does not depend on the entropy bonus, which only keeps its tokens."""
    live, dead = make_batch(9).groups, with_equal_rewards(make_batch(10)).groups
    config = TrainConfig(beta=0.5, kl_in=kl_in, kl_estimator="k1", preset="dr_grpo", max_grad_norm=9)
    small = config.model_copy(update={"entropy_bonus": 1e-9})
    step(policy, adapter_dir, tmp_path / "alone", Batch(groups=live), config)
    expected = gradients(policy)
    done = step(policy, adapter_dir, tmp_path / "mixed", Batch(groups=[*dead, *live]), small)
    assert done.metrics["data/step_num_groups_dead"] == len(dead)
    # The constant normalisation divides by twice the trajectories.
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(2 * gradient, expected[name], rtol=1e-3, atol=1e-6)


def test_a_group_of_equal_answers_is_counted(policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch) -> None:
    groups = make_batch(11).groups
    first = groups[0].trajectories[0].sequences
    same = [trajectory.model_copy(update={"sequences": first}) for trajectory in groups[0].trajectories]
    batch = Batch(groups=[TrainableGroup(trajectories=same), *groups[1:]])
    done = step(policy, adapter_dir, tmp_path / "out", batch, TrainConfig())
    assert done.metrics["data/groups_identical"] == 1
    assert done.metrics["data/step_num_groups_trainable"] == 3


def test_rewards_that_differ_by_rounding_leave_the_weights_as_they_are(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    means = [0.699999988079071, 0.7, 0.7000000476837158]  # of float32
    groups = [
        TrainableGroup(
            trajectories=[
                trajectory.model_copy(update={"reward": reward})
                for trajectory, reward in zip(group.trajectories, means, strict=True)
            ]
        )
        for group in make_batch(12).groups
    ]
    done = step(policy, adapter_dir, tmp_path / "out", Batch(groups=groups), TrainConfig())
    assert done.unchanged and done.metrics["data/step_num_groups_dead"] == 3
    before, after = (
        load_file(adapter_dir / ADAPTER_FILE),
        load_file(tmp_path / "out" / ADAPTER_FILE),
    )
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_first_step_moves_each_weight_by_the_learning_rate_against_its_gradient(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    before = load_file(adapter_dir / ADAPTER_FILE)
    config = TrainConfig(learning_rate=1e-3, max_grad_norm=0.5)
    done = step(policy, adapter_dir, tmp_path / "out", make_batch(13), config)
    after = load_file(tmp_path / "out" / ADAPTER_FILE)
    assert done.metrics["loss/grad_norm"] > 0.5
    assert done.metrics["loss/learning_rate"] == 1e-3
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients(policy).values()))
    assert norm == pytest.approx(0.5, rel=1e-4)
    for name, gradient in gradients(policy).items():
        # AdamW from nothing: m / sqrt(v) = g / |g|.
        expected = -1e-3 * gradient / (gradient.abs() + 1e-8)
        key = name.replace(".default", "")
        torch.testing.assert_close(after[key] - before[key], expected, rtol=1e-2, atol=1e-6)


def test_steps_with_reload_between_equal_steps_of_one_process_bit_for_bit(
    base_dir: Path, tmp_path: Path, make_batch
) -> None:
    config = TrainConfig(learning_rate=1e-2, beta=0.05)
    batches = [make_batch(seed) for seed in range(3)]

    resumed = start(Policy(str(base_dir), torch.float32), tmp_path / "resumed0")
    for index, batch in enumerate(batches):
        fresh = Policy(str(base_dir), torch.float32)
        out = tmp_path / f"resumed{index + 1}"
        step(fresh, resumed, out, batch, config)
        resumed = out

    # The same steps with torch's own optimizer held in memory throughout.
    policy = Policy(str(base_dir), torch.float32)
    start(policy, tmp_path / "kept0")
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-2, weight_decay=0.0)
    kept = tmp_path / "kept0"
    for index, batch in enumerate(batches):
        weights = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
        step(policy, kept, tmp_path / f"scratch{index}", batch, config)
        with torch.no_grad():
            for name, parameter in policy.parameters.items():
                parameter.copy_(weights[name])
        optimizer.step()
        kept = tmp_path / f"kept{index + 1}"
        kept.mkdir()
        policy.save_adapter(kept)

    assert (kept / ADAPTER_FILE).read_bytes() == (resumed / ADAPTER_FILE).read_bytes()
    state = load_file(resumed / "optimizer.safetensors")
    for name, parameter in policy.parameters.items():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[f"{name}.{key}"], optimizer.state[parameter][key]), (name, key)


def test_a_base_that_leaves_the_device_between_steps_trains_the_same(
    policy: Policy, base_dir: Path, tmp_path: Path, make_batch
) -> None:
    """Also with another adapter's shape in between, for which PEFT wraps the base anew."""
    wide, config = LoRAConfig(rank=16), TrainConfig()
    for way, own in (("stay", policy), ("leave", Policy(str(base_dir), torch.float32))):
        before = start(own, tmp_path / way / "a0"), start(own, tmp_path / way / "b0", wide)
        for index in (1, 2):
            after = tmp_path / way / f"a{index}", tmp_path / way / f"b{index}"
            for lora, old, new in zip((None, wide), before, after, strict=True):
                done = step(own, old, new, make_batch(index), config, lora=lora, between_steps=way)  # type: ignore[arg-type]
                assert ("time/step_leave_s" in done.metrics) == (way == "leave")
            before = after
    for name in ("a2", "b2"):
        assert contents(tmp_path / "stay" / name) == contents(tmp_path / "leave" / name)


@pytest.mark.parametrize("way", ["stay", "leave"])
def test_the_base_leaves_before_the_step_is_written(
    base_dir: Path, tmp_path: Path, make_batch, way: BetweenSteps
) -> None:
    """The engine wakes meanwhile."""
    own = Policy(str(base_dir), torch.float32)
    start(own, tmp_path / "0")
    task = TrainTask(
        lora=LoRAConfig(),
        in_dir=str(tmp_path / "0"),
        out_dir=str(tmp_path / "1"),
        config=TrainConfig(),
        batch=make_batch(1),
    )
    was_away: dict[str, bool] = {}

    def report(progress: Progress) -> None:
        was_away[progress.phase] = own._is_away
        assert not (tmp_path / "1" / ADAPTER_FILE).exists()

    train(own, task, BUDGET, report, between_steps=way)
    assert was_away == {"train": False, "save": way == "leave"}
    assert (tmp_path / "1" / ADAPTER_FILE).exists()


def test_the_times_of_a_step_wait_for_the_gpu(
    policy: Policy, tmp_path: Path, make_batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU computes while Python goes on."""
    start(policy, tmp_path / "0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seconds = 0.0

    def synchronize(*_: object) -> None:
        nonlocal seconds
        seconds += 1.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: seconds)
    metrics = step(policy, tmp_path / "0", tmp_path / "1", make_batch(1), TrainConfig()).metrics
    for phase in ("plan", "forward", "backward", "optimizer"):
        assert metrics[f"time/step_{phase}_s"] >= 1.0, phase


def test_the_copy_of_a_base_is_as_large_as_its_weights(base_dir: Path, tmp_path: Path) -> None:
    own = Policy(str(base_dir), torch.float32)
    own.init_adapter(LoRAConfig(), 0)
    optimizer = torch.optim.AdamW(own.parameters.values())
    weights = {name: parameter.detach().clone() for name, parameter in own.model.named_parameters()}
    own.leave_device(optimizer, keep_copy=True)
    assert own._away is not None
    sizes = [parameter.nbytes for parameter in own.model.parameters() if not parameter.requires_grad]
    assert own._away.num_bytes == sum(sizes)
    own.return_to_device()
    for name, parameter in own.model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    layer = next(module for module in own.model.modules() if isinstance(module, torch.nn.Linear))
    layer.state = SimpleNamespace(CB=torch.ones(8))  # type: ignore[assignment]
    own.leave_device(optimizer, keep_copy=False)
    assert layer.state.CB is None, "bitsandbytes' second reference to the weights"
    assert sum(parameter.numel() for parameter in own.model.parameters() if not parameter.requires_grad) == 0


def test_interleaved_models_of_different_shape_equal_each_alone(base_dir: Path, tmp_path: Path, make_batch) -> None:
    loras = {
        "wide": LoRAConfig(rank=8, alpha=16),
        "narrow": LoRAConfig(rank=2, alpha=2, target_modules=["q_proj", "v_proj"]),
    }
    config = TrainConfig(learning_rate=1e-2)

    def run(order: list[str], folder: Path) -> dict[str, dict[str, bytes]]:
        """One policy takes the turns in order: a model's first turn makes it, each later one trains it."""
        policy = Policy(str(base_dir), torch.float32)
        turns = dict.fromkeys(order, 0)
        for name in order:
            out = folder / f"{name}{turns[name]}"
            if turns[name] == 0:
                start(policy, out, loras[name])
            else:
                before = folder / f"{name}{turns[name] - 1}"
                step(policy, before, out, make_batch(turns[name]), config, lora=loras[name])
            turns[name] += 1
        return {name: contents(folder / f"{name}{count - 1}") for name, count in turns.items()}

    together = run(["wide", "narrow"] * 3, tmp_path / "together")
    alone = {name: run([name] * 3, tmp_path / "alone")[name] for name in loras}
    assert together == alone


def test_batch_without_signal_writes_the_same_weights_and_state(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    config = TrainConfig(learning_rate=1e-2)
    step(policy, adapter_dir, tmp_path / "1", make_batch(1), config)
    dead = Batch(groups=[TrainableGroup(trajectories=group.trajectories[:1]) for group in make_batch(2).groups])
    done = step(policy, tmp_path / "1", tmp_path / "2", dead, config)
    assert done.unchanged
    assert contents(tmp_path / "2") == contents(tmp_path / "1")
    assert "optimizer.safetensors" in contents(tmp_path / "2")
    assert done.metrics["data/step_num_gradient_steps"] == 0
    assert done.metrics["data/step_num_groups_trainable"] == 0
    assert done.metrics["data/step_num_groups_submitted"] == 3
    assert all(map(math.isfinite, done.metrics.values()))


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_step_that_is_not_finite_writes_nothing(
    policy: Policy, adapter_dir: Path, tmp_path: Path, logprob: float
) -> None:
    sequences = [TokenSequence(token_ids=[1, 2, 3], logprobs=[None, -1.0, logprob])]
    batch = Batch(
        groups=[
            TrainableGroup(
                trajectories=[TrainableTrajectory(reward=reward, sequences=sequences) for reward in (0.0, 1.0)]
            )
        ]
    )
    with pytest.raises(FloatingPointError):
        step(policy, adapter_dir, tmp_path / "out", batch, TrainConfig())
    assert not (tmp_path / "out").exists()


def test_metrics_and_progress_of_a_step(policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch) -> None:
    batch = near_policy(policy, adapter_dir, make_batch(5))
    task = TrainTask(
        lora=LoRAConfig(),
        in_dir=str(adapter_dir),
        out_dir=str(tmp_path / "out"),
        config=TrainConfig(beta=0.1),
        batch=batch,
    )
    reports: list[Progress] = []
    done = train(policy, task, 60, reports.append)

    assert not done.unchanged
    training = [report for report in reports if report.phase == "train"]
    assert [report.completed for report in training] == list(range(1, len(training) + 1))
    assert len(training) > 1
    assert {report.total for report in training} == {len(training)}

    sequences = [
        sequence for group in batch.groups for trajectory in group.trajectories for sequence in trajectory.sequences
    ]
    num_tokens = sum(len(sequence.logprobs) - sequence.logprobs.count(None) for sequence in sequences)
    metrics = done.metrics
    assert metrics["data/step_trainable_assistant_tokens"] == num_tokens
    assert metrics["data/step_num_rows"] == len([sequence for sequence in sequences if any(sequence.logprobs)])
    assert 0 < metrics["loss/logprob_gap_mean"] < metrics["loss/logprob_gap_max"] <= 0.5 + 1e-4
    assert metrics["loss/clipped_token_fraction"] == 0
    assert metrics["loss/policy_ratio_mean"] == metrics["loss/policy_ratio_p99"] == 1
    assert metrics["loss/corrected_token_fraction"] == 0
    assert math.exp(-0.5) < metrics["loss/importance_ratio_mean"] < metrics["loss/importance_ratio_p95"]
    assert metrics["loss/importance_ratio_p95"] <= metrics["loss/importance_ratio_p99"] < math.exp(0.501)
    assert 0 < metrics["loss/entropy"] < math.log(128)
    assert metrics["loss/kl_policy_ref"] > 0
    assert set(metrics) >= {
        "loss/train",
        "loss/grad_norm",
        "loss/learning_rate",
        "data/step_num_groups_submitted",
        "data/step_num_groups_trainable",
        "data/step_num_trajectories",
        "data/step_num_gradient_steps",
        "time/step_forward_backward_s",
        "time/step_optimizer_s",
        "time/step_save_s",
        "throughput/avg_trainer_tok_per_s",
    }
    assert all(map(math.isfinite, metrics.values()))


def test_optimizer_state_of_another_adapter_is_refused(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    narrow = LoRAConfig(rank=2)
    start(policy, tmp_path / "narrow", narrow)
    step(policy, tmp_path / "narrow", tmp_path / "narrow1", make_batch(1), TrainConfig(), lora=narrow)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / ADAPTER_FILE).write_bytes((adapter_dir / ADAPTER_FILE).read_bytes())
    (mixed / "optimizer.safetensors").write_bytes((tmp_path / "narrow1/optimizer.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"optimizer\.safetensors"):
        step(policy, mixed, tmp_path / "out", make_batch(2), TrainConfig())


COSINE = TrainConfig(learning_rate=1e-3, warmup_steps=5, schedule="cosine", schedule_steps=100)


def test_the_schedule_counts_the_models_steps_and_not_those_of_its_moments(
    policy: Policy, tmp_path: Path, make_batch
) -> None:
    """A checkpoint after 90 optimizer steps whose optimizer state is gone, as after a rollback, a fork or an import."""
    start(policy, tmp_path / "0")
    done = step(policy, tmp_path / "0", tmp_path / "1", make_batch(1), COSINE, optimizer_steps=90)
    of_schedule = 1e-3 * (1 + math.cos(math.pi * 85 / 95)) / 2
    assert done.metrics["loss/learning_rate"] == pytest.approx(of_schedule / 10)
    assert done.optimizer_steps == 91
    assert [note for note in done.notes if "optimizer state of step 0 is not kept" in note]

    done = step(policy, tmp_path / "1", tmp_path / "2", make_batch(2), COSINE, optimizer_steps=91)
    of_schedule = 1e-3 * (1 + math.cos(math.pi * 86 / 95)) / 2
    assert done.metrics["loss/learning_rate"] == pytest.approx(of_schedule * 2 / 10)
    assert (done.optimizer_steps, done.notes) == (92, [])


def test_a_model_at_its_own_start_has_its_own_warm_up_only(policy: Policy, tmp_path: Path, make_batch) -> None:
    start(policy, tmp_path / "0")
    config = COSINE.model_copy(update={"passes": 2})
    done = step(policy, tmp_path / "0", tmp_path / "1", make_batch(1), config, optimizer_steps=0)
    assert done.metrics["loss/learning_rate"] == pytest.approx(1e-3 * (1 / 5 + 2 / 5) / 2)
    assert (done.optimizer_steps, done.notes) == (2, [])


def test_a_checkpoint_of_an_earlier_version_counts_by_its_optimizer_state(
    policy: Policy, tmp_path: Path, make_batch
) -> None:
    start(policy, tmp_path / "0")
    for index in range(3):
        done = step(policy, tmp_path / str(index), tmp_path / str(index + 1), make_batch(index), COSINE)
        assert done.metrics["loss/learning_rate"] == pytest.approx(1e-3 * (index + 1) / 5)
        assert (done.optimizer_steps, done.notes) == (index + 1, [])


def test_steps_behind_the_end_of_a_cosine_are_named_and_change_nothing(
    policy: Policy, tmp_path: Path, make_batch
) -> None:
    start(policy, tmp_path / "0")
    config = COSINE.model_copy(update={"passes": 2, "schedule_steps": 40})
    done = step(policy, tmp_path / "0", tmp_path / "1", make_batch(1), config, optimizer_steps=45)
    (note,) = [note for note in done.notes if "learning rate was 0" in note]
    assert note.startswith("the learning rate was 0 in 2 of 2 optimizer steps") and "schedule_begins=45" in note
    assert "schedule_steps is 40" in note and "45 optimizer steps" in note
    assert done.unchanged
    before, after = (load_file(tmp_path / name / ADAPTER_FILE) for name in "01")
    assert all(torch.equal(before[name], after[name]) for name in before)

    config = config.model_copy(update={"schedule_begins": 45})
    done = step(policy, tmp_path / "0", tmp_path / "2", make_batch(1), config, optimizer_steps=45)
    assert not done.unchanged and not [note for note in done.notes if "learning rate was 0" in note]


def test_a_batch_without_signal_takes_no_optimizer_step(policy: Policy, tmp_path: Path) -> None:
    start(policy, tmp_path / "0")
    nothing = Batch(groups=[])
    done = step(policy, tmp_path / "0", tmp_path / "1", nothing, COSINE, optimizer_steps=7)
    assert (done.unchanged, done.optimizer_steps, done.notes) == (True, 7, [])


def test_rewarded_token_becomes_likelier(policy: Policy, tmp_path: Path) -> None:
    """On-policy: the test samples 16 completions of one token a step and rewards one that the base sometimes says."""
    generator = torch.Generator().manual_seed(0)
    prompt = [3, 14, 15, 92, 65]
    folder = start(policy, tmp_path / "0")

    def next_logprobs() -> torch.Tensor:
        policy.use_trees(False)
        with torch.no_grad():
            return policy.model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)

    rewarded = int(next_logprobs().argsort(descending=True)[2])
    first = float(next_logprobs()[rewarded].exp())
    for index in range(8):
        logprobs_V = next_logprobs()
        sampled = torch.multinomial(logprobs_V.exp(), 16, replacement=True, generator=generator)
        trajectories = [
            TrainableTrajectory(
                reward=float(token == rewarded),
                sequences=[TokenSequence(token_ids=[*prompt, token], logprobs=[None] * 5 + [float(logprobs_V[token])])],
            )
            for token in sampled.tolist()
        ]
        batch = Batch(groups=[TrainableGroup(trajectories=trajectories)])
        out = tmp_path / str(index + 1)
        policy.use_trees(True)
        done = step(policy, folder, out, batch, TrainConfig(learning_rate=5e-3))
        assert done.unchanged or done.metrics["loss/logprob_gap_max"] < 1e-4
        folder = out
    last = float(next_logprobs()[rewarded].exp())
    assert first < 0.2
    assert last > 0.6


def test_unknown_log_probabilities_change_nothing_where_the_policy_is_the_sampler(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    known = near_policy(policy, adapter_dir, make_batch(21), noise=0.0)
    unknown = Batch(
        groups=[
            TrainableGroup(
                trajectories=[
                    TrainableTrajectory(
                        reward=trajectory.reward,
                        sequences=[to_recompute(sequence) for sequence in trajectory.sequences],
                    )
                    for trajectory in group.trajectories
                ]
            )
            for group in known.groups
        ]
    )
    config = TrainConfig(beta=0.1)
    first = step(policy, adapter_dir, tmp_path / "known", known, config)
    expected = gradients(policy)
    second = step(policy, adapter_dir, tmp_path / "unknown", unknown, config)
    assert second.metrics["loss/train"] == pytest.approx(first.metrics["loss/train"], abs=1e-5)
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)
    assert "loss/logprob_gap_mean" not in second.metrics
    assert second.metrics["loss/importance_ratio_mean"] == 1.0


def to_recompute(sequence: TokenSequence) -> TokenSequence:
    places = [index for index, value in enumerate(sequence.logprobs) if value is not None and index > 0]
    return TokenSequence(token_ids=sequence.token_ids, logprobs=[None] * len(sequence.token_ids), recompute=places)


class TightPolicy(Policy):
    """Runs out of memory above so many tokens at a time."""

    limit = 0
    num_failures = 0

    def scores(self, batch: MicroBatch, *, with_entropy_gradient: bool = False):
        if batch.num_tokens > self.limit:
            self.num_failures += 1
            raise torch.OutOfMemoryError("out of memory")
        return super().scores(batch, with_entropy_gradient=with_entropy_gradient)


def test_step_out_of_memory_is_tried_again_with_half_the_tokens_and_is_the_same_step(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    batch, config = make_batch(22), TrainConfig(learning_rate=1e-2)
    step(policy, adapter_dir, tmp_path / "wide", batch, config)
    expected = load_file(tmp_path / "wide" / ADAPTER_FILE)
    tight = TightPolicy(str(base_dir), torch.float32)
    tight.limit = 100
    done = step(tight, adapter_dir, tmp_path / "tight", batch, config, budget=400)
    assert done.metrics["data/step_num_out_of_memory_retries"] == 2 == tight.num_failures
    assert done.notes == [
        "out of memory: tried again with 200 tokens at a time",
        "out of memory: tried again with 100 tokens at a time",
    ]
    for name, tensor in load_file(tmp_path / "tight" / ADAPTER_FILE).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)

    tight.limit = 10
    with pytest.raises(torch.OutOfMemoryError):
        step(tight, adapter_dir, tmp_path / "hopeless", batch, config, budget=400)
    assert not (tmp_path / "hopeless").exists()


def test_what_fitted_after_memory_ran_out_is_remembered(
    base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    tight, learned = TightPolicy(str(base_dir), torch.float32), dict[str, int]()
    tight.limit = 100

    def take(number: int, seed: int = 22) -> Done:
        task = TrainTask(
            lora=LoRAConfig(),
            in_dir=str(adapter_dir),
            out_dir=str(tmp_path / str(number)),
            config=TrainConfig(),
            batch=make_batch(seed),
            budgets=learned,
        )
        return train(tight, task, 400, lambda _: None, learn=learned.__setitem__)

    take(1)
    assert tight.num_failures == 2
    done = take(2)
    assert tight.num_failures == 2 and done.metrics["data/step_num_out_of_memory_retries"] == 0
    assert done.notes[-1].startswith("100 tokens at a time, with gradient checkpointing")
    assert ".server/budgets.json" in done.notes[-1]
    (key,) = learned
    assert key.startswith("CPU, ") and f"{base_dir}; rank 8; rows of 32" in key
    tight.limit = 10
    with pytest.raises(torch.OutOfMemoryError):
        take(3)
    tight.limit = 100
    assert learned == {key: 100}
    assert budget_key("CPU", main_memory(), str(base_dir), 16, 64) not in learned


def test_what_fitted_after_the_process_was_killed_is_remembered(
    base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    """The divisor comes after the budget that an earlier job learned."""
    policy, learned = Policy(str(base_dir), torch.float32), dict[str, int]()
    task = TrainTask(
        lora=LoRAConfig(),
        in_dir=str(adapter_dir),
        out_dir=str(tmp_path / "1"),
        config=TrainConfig(),
        batch=make_batch(22),
        budget_divisor=4,
    )
    done = train(policy, task, 400, lambda _: None, learn=learned.__setitem__)
    assert done.notes[0].startswith("100 tokens at a time, with gradient checkpointing")
    (key,) = learned
    again = task.model_copy(update={"out_dir": str(tmp_path / "2"), "budget_divisor": 2, "budgets": dict(learned)})
    train(policy, again, 400, lambda _: None, learn=learned.__setitem__)
    assert learned == {key: 50}


def test_what_did_not_fit_is_not_remembered(base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch) -> None:
    """A job of one optimizer step looks at nothing ahead, which always fits."""

    class KilledPolicy(Policy):
        def scores(self, batch: MicroBatch, *, with_entropy_gradient: bool = False):
            raise KeyboardInterrupt

    policy, learned = KilledPolicy(str(base_dir), torch.float32), dict[str, int]()
    policy.tree_gap = 0.0
    batch, config = make_batch(22), TrainConfig()
    task = train_task(adapter_dir, tmp_path / "1", batch, config, budget_divisor=2)
    with pytest.raises(KeyboardInterrupt):
        train(policy, task, 400, lambda _: None, learn=learned.__setitem__)
    assert learned == {}


def test_what_decides_the_split_of_a_step_is_recorded_and_repeats_it(
    base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    """Largest trees above the budget: the factor decides how they are cut."""
    batch, config = make_batch(22, num_openings=1), TrainConfig(learning_rate=1e-2)
    policy = Policy(str(base_dir), torch.float32)
    policy.checkpointing_factor = 1.5
    budgets = {budget_key("CPU", main_memory(), policy.base_model, 8, 24): 40}
    first = train_task(adapter_dir, tmp_path / "first", batch, config, budget_divisor=2, budgets=budgets)
    environment = train(policy, first, 400, lambda _: None).environment
    assert environment == {
        "max_tokens": "20",
        "max_tokens_at_end": "20",
        "checkpointing": "True",
        "checkpointing_factor": "1.5",
        "max_seq_length": "None",
        "optimizer_steps": "None",
        "lost_layers": "",
        "ranks": "1",
        "is_sharded": "False",
    }
    again = train_task(adapter_dir, tmp_path / "again", batch, config, checkpointing=True)
    assert train(policy, again, 20, lambda _: None).environment == environment
    assert contents(tmp_path / "again") == contents(tmp_path / "first")

    tight = TightPolicy(str(base_dir), torch.float32)
    tight.limit = 100
    done = step(tight, adapter_dir, tmp_path / "tight", make_batch(22), config, budget=400)
    ends = done.environment["max_tokens"], done.environment["max_tokens_at_end"]
    assert ends == ("400", "100") and done.environment["checkpointing"] == "False"


@pytest.mark.parametrize("objective", ["policy", "likelihood"])
def test_small_weights_do_not_vanish_in_float16(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch, objective: Any
) -> None:
    """A token's weight of 1e-8 is below the smallest float16."""
    config = TrainConfig(objective=objective, normalisation="constant", constant_length=10**7)
    batch = near_policy(policy, adapter_dir, make_batch(24, num_openings=1))
    expected = step(policy, adapter_dir, tmp_path / "float32", batch, config)
    half = Policy(str(base_dir), torch.float16)
    done = step(half, adapter_dir, tmp_path / "float16", batch, config)
    assert done.metrics["loss/grad_norm"] == pytest.approx(expected.metrics["loss/grad_norm"], rel=0.02)


def test_checkpointing_changes_no_gradient(policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch) -> None:
    batch, config = make_batch(23, num_openings=2), TrainConfig()
    step(policy, adapter_dir, tmp_path / "kept", batch, config)
    expected = gradients(policy)
    policy.load_adapter(LoRAConfig(), adapter_dir)
    trained = make_train_batch(batch, config)
    task = train_task(adapter_dir, tmp_path, batch, config)
    for parameter in policy.parameters.values():
        parameter.grad = None
    policy.use_checkpointing(True)
    compute_gradient(policy, task, trained, BUDGET, lambda _: None, [])
    policy.use_checkpointing(False)
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


def test_a_prompt_that_all_groups_share_does_not_need_checkpointing(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is one tree above the budget, and each of its groups fits."""
    batch = make_batch(23)
    for group in batch.groups:
        for trajectory in group.trajectories:
            for sequence in trajectory.sequences:
                sequence.token_ids[:0] = range(3, 3 + MIN_SHARED_TOKENS)
                sequence.logprobs[:0] = [None] * MIN_SHARED_TOKENS
    used: list[bool] = []
    monkeypatch.setattr(policy, "use_checkpointing", used.append)
    done = step(policy, adapter_dir, tmp_path / "whole", batch, TrainConfig(), budget=10_000)
    whole = gradients(policy)
    assert done.metrics["data/step_num_micro_batches"] == 1
    half = int(done.metrics["data/step_computed_tokens"] * 0.6)
    done = step(policy, adapter_dir, tmp_path / "cut", batch, TrainConfig(), budget=half)
    assert done.metrics["data/step_num_micro_batches"] == 2
    assert not any(used)
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-7)


def train_task(in_dir: Path, out_dir: Path, batch: Batch, config: TrainConfig, **options) -> TrainTask:
    return TrainTask(
        lora=LoRAConfig(),
        in_dir=str(in_dir),
        out_dir=str(out_dir),
        config=config,
        batch=batch,
        **options,
    )


def test_kl_in_the_reward_lowers_it_by_the_samplers_kl(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    """Two trajectories of one token each, where the arithmetic fits a line."""
    policy.load_adapter(LoRAConfig(), adapter_dir)
    sequences = [TokenSequence(token_ids=[3, 4, answer], logprobs=[None, None, -1.0]) for answer in (7, 8)]
    batch = Batch(
        groups=[
            TrainableGroup(
                trajectories=[
                    TrainableTrajectory(reward=reward, sequences=[sequence])
                    for reward, sequence in zip((1.0, 0.0), sequences, strict=True)
                ]
            )
        ]
    )
    base = []
    with policy.model.disable_adapter():
        base = [float(policy.sequence_logprobs(sequence.token_ids)[-1]) for sequence in sequences]
    # k1 at the sampler: -1 - base. A = (r - mean) with the lowered rewards, clip none.
    rewards = [1.0 - 0.5 * (-1 - base[0]), 0.0 - 0.5 * (-1 - base[1])]
    own = [float(policy.sequence_logprobs(sequence.token_ids)[-1]) for sequence in sequences]
    mean = sum(rewards) / 2
    expected = -sum(
        min(2.0, math.exp(logprob + 1)) * (reward - mean) for logprob, reward in zip(own, rewards, strict=True)
    )
    config = TrainConfig(beta=0.5, kl_in="reward", kl_estimator="k1", clip="none", scaling="none")
    done = step(policy, adapter_dir, tmp_path / "out", batch, config)
    assert done.metrics["loss/train"] == pytest.approx(expected / 2, rel=1e-4)


def test_picture_of_the_packed_trees_is_written_on_demand(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    config = TrainConfig(plot_tensors=True)
    step(policy, adapter_dir, tmp_path / "out", make_batch(25, num_openings=2), config, budget=60)
    assert (tmp_path / "out" / "tensors.png").read_bytes().startswith(b"\x89PNG")


def test_model_that_trees_do_not_fit_is_trained_by_rows_and_says_so(
    tmp_path: Path, make_batch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 2 soft-caps its attention scores."""
    config = Gemma2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=128,
        sliding_window=4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    policy = Policy(str(tmp_path / "base"), torch.float32)
    folder = start(policy, tmp_path / "0")
    done = step(policy, folder, tmp_path / "1", make_batch(26), TrainConfig())
    assert "prefixes are not shared" in done.notes[0] and "softcap" in done.notes[0]
    assert done.metrics["data/step_is_shared"] == 0.0
    assert "prefixes are not shared" in caplog.text
    again = step(policy, tmp_path / "1", tmp_path / "2", make_batch(27), TrainConfig())
    assert again.notes == []


class CompiledPolicy(Policy):
    """Compiles its attention, as on a GPU."""

    attention_kind = "flex"  # type: ignore[assignment]

    def _tree_arguments(self, forest: Forest) -> dict[str, Any]:
        arguments = super()._tree_arguments(forest)
        return arguments | {"forest": ForestAttention.of(forest, "segments", self.device)}


@pytest.mark.parametrize("config", [TrainConfig(beta=0.01), TrainConfig(mini_batches=2)])
def test_a_first_job_that_looks_ahead_tries_trees(
    base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch, config: TrainConfig
) -> None:
    """This needs a gradient; looking ahead computes none."""
    compiled = CompiledPolicy(str(base_dir), torch.float32)
    batch = make_batch(28, num_openings=2)
    done = step(compiled, adapter_dir, tmp_path / "1", batch, config)
    assert compiled.has_tried_trees and done.metrics["data/step_is_shared"] == 1.0


class UncompiledPolicy(CompiledPolicy):
    """The backward pass of its attention does not fit the GPU."""

    def logprobs(self, batch: MicroBatch, **options: Any) -> Any:
        logprobs_N, more = super().logprobs(batch, **options)
        if batch.is_shared and logprobs_N.requires_grad:
            logprobs_N.register_hook(self._fail)
        return logprobs_N, more

    def _fail(self, _: torch.Tensor) -> None:
        raise InductorError(RuntimeError("out of resource: shared memory"), None)


def test_trees_that_cannot_be_compiled_are_not_used(
    base_dir: Path, policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    uncompiled = UncompiledPolicy(str(base_dir), torch.float32)
    batch, config = make_batch(28, num_openings=2), TrainConfig()
    done = step(uncompiled, adapter_dir, tmp_path / "rows", batch, config)
    assert "cannot be compiled for this GPU" in done.notes[0]
    assert "out of resource: shared memory" in done.notes[0]
    expected = step(policy, adapter_dir, tmp_path / "trees", batch, config)
    assert done.metrics["loss/grad_norm"] == pytest.approx(expected.metrics["loss/grad_norm"], rel=1e-4)


class DistortedPolicy(Policy):
    """Its trees are not its sequences."""

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        hidden_ND = super()._hidden(batch)
        return hidden_ND * 1.5 if batch.is_shared else hidden_ND


def test_trees_that_differ_from_rows_are_noticed_before_they_train(
    base_dir: Path, policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    distorted = DistortedPolicy(str(base_dir), torch.float32)
    batch, config = make_batch(28, num_openings=2), TrainConfig()
    done = step(distorted, adapter_dir, tmp_path / "distorted", batch, config)
    assert "log-probabilities differ by" in done.notes[0]
    assert done.metrics["data/step_tree_gap"] > 1e-3
    expected = step(policy, adapter_dir, tmp_path / "trees", batch, config)
    assert done.metrics["loss/grad_norm"] == pytest.approx(expected.metrics["loss/grad_norm"], rel=1e-4)
    assert expected.metrics["data/step_tree_gap"] < 1e-4
    assert expected.metrics["data/step_shared_token_saving"] > 0


class LeakingPolicy(Policy):
    """Its trees are right as long as they have one path, like those of a model with a recurrent state."""

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        hidden_ND = super()._hidden(batch)
        is_path = batch.num_tokens == max(len(path) for path in batch.forest.paths)
        return hidden_ND if is_path or not batch.is_shared else hidden_ND * 1.5


def test_trees_are_checked_where_they_branch(base_dir: Path, adapter_dir: Path, tmp_path: Path) -> None:
    """The longest rollout came twice, once with a prefix of it: these are one path, which proves nothing."""
    long, other = [*range(3, 60)], [*range(3, 20), *range(70, 80)]

    def make(*rollouts: list[int]) -> Batch:
        sequences = [
            TokenSequence(token_ids=rollout, logprobs=[None] * 10 + [-1.0] * (len(rollout) - 10))
            for rollout in rollouts
        ]
        trajectories = [
            TrainableTrajectory(reward=float(index), sequences=[sequence]) for index, sequence in enumerate(sequences)
        ]
        return Batch(groups=[TrainableGroup(trajectories=trajectories)])

    leaking = LeakingPolicy(str(base_dir), torch.float32)
    config = TrainConfig()
    path = step(leaking, adapter_dir, tmp_path / "path", make(long, long, long[:30]), config)
    assert not path.notes and "data/step_tree_gap" not in path.metrics
    branch = step(leaking, adapter_dir, tmp_path / "branch", make(long, long, other), config)
    assert "log-probabilities differ by" in branch.notes[0]


class DistortedRowsPolicy(Policy):
    """Neither its trees nor its sequences are what the plain model computes."""

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        return super()._hidden(batch) * 1.5


def test_rows_that_differ_from_the_plain_model_train_nothing(
    base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    distorted = DistortedRowsPolicy(str(base_dir), torch.float32)
    with pytest.raises(ValueError, match="--trainer peft"):
        step(distorted, adapter_dir, tmp_path / "1", make_batch(28), TrainConfig())
    assert not (tmp_path / "1").exists()


def test_each_mini_batch_is_a_step_with_denominators_of_its_own_and_the_policy_of_the_start(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    """Two passes over two mini-batches, against plain autograd of the formula with torch's AdamW."""
    batch = near_policy(policy, adapter_dir, make_batch(31, num_groups=4))
    config = TrainConfig(passes=2, mini_batches=2, learning_rate=1e-2, max_grad_norm=1e9)
    task = train_task(adapter_dir, tmp_path / "out", batch, config, seed=7)
    done = train(policy, task, 60, lambda _: None)
    parts = [mini_batch.sequences for mini_batch in split_mini_batches(task, make_train_batch(batch, config), [])]

    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True).eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    sequences = make_train_batch(batch, config).sequences

    def score(sequence: TrainSequence) -> torch.Tensor:
        ids = torch.tensor([[*sequence.token_ids, sequence.targets[-1]]])
        logprobs_TV = torch.log_softmax(model(input_ids=ids).logits[0], -1)
        return logprobs_TV[sequence.positions, sequence.targets]

    with torch.no_grad():
        olds = [score(sequence) for sequence in sequences]
    for part in parts:
        total, num_tokens = torch.zeros(()), sum(len(sequences[index].targets) for index in part)
        for index in part:
            sequence, logprobs = sequences[index], score(sequences[index])
            advantages = torch.tensor(sequence.advantages)
            weights = (olds[index] - torch.tensor(sequence.sampled_logprobs)).exp().clamp(max=2.0)
            ratios = (logprobs - olds[index]).exp()
            bounded = torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
            total = total - (weights * bounded).sum()
        optimizer.zero_grad()
        (total / num_tokens).backward()
        optimizer.step()

    expected = {
        name.replace(".default", ""): parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    for name, tensor in load_file(tmp_path / "out" / ADAPTER_FILE).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)
    assert done.metrics["data/step_num_gradient_steps"] == 4 == len(parts)
    assert done.metrics["loss/clipped_token_fraction"] > 0


def test_the_first_of_several_steps_clips_no_rounding(
    base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    """In bfloat16 other micro-batches round otherwise, by more than GSPO's clip."""
    own = Policy(str(base_dir), torch.bfloat16)
    parts: list[dict[str, float]] = []

    def merge(steps: list[dict[str, float]]) -> dict[str, float]:
        parts.extend(steps)
        return merge_steps(steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("art_server.trainer.job.merge_steps", merge)
        config = TrainConfig(preset="gspo", mini_batches=6)
        step(own, adapter_dir, tmp_path / "1", make_batch(36, num_groups=6, num_openings=1), config)
    assert len(parts) > 2 and parts[0]["loss/clipped_token_fraction"] == 0.0
    assert parts[0]["loss/policy_ratio_mean"] == 1.0


def test_mini_batches_are_shuffled_by_the_seed_and_a_repeated_job_is_bit_equal(
    policy: Policy, base_dir: Path, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    batch, config = make_batch(32, num_groups=6), TrainConfig(passes=2, mini_batches=3)
    trained = make_train_batch(batch, config)
    group_of = [index // 3 for index in range(18)]
    task = train_task(adapter_dir, tmp_path / "1", batch, config, seed=1)
    parts = [mini_batch.sequences for mini_batch in split_mini_batches(task, trained, [])]
    assert len(parts) == 6
    for first in (0, 3):
        groups = [
            {group_of[trained.sequences[index].trajectory] for index in part} for part in parts[first : first + 3]
        ]
        assert sorted(group for part in groups for group in part) == list(range(6))
        assert [len(part) for part in groups] == [2, 2, 2]
    assert parts[:3] != parts[3:]
    other = train_task(adapter_dir, tmp_path / "2", batch, config, seed=2)
    assert [mini_batch.sequences for mini_batch in split_mini_batches(other, trained, [])] != parts

    train(policy, task, BUDGET, lambda _: None)
    again = train_task(adapter_dir, tmp_path / "again", batch, config, seed=1)
    train(Policy(str(base_dir), torch.float32), again, BUDGET, lambda _: None)
    assert contents(tmp_path / "1") == contents(tmp_path / "again")


def test_more_mini_batches_than_groups_with_signal_are_as_many_as_groups_and_are_noted(
    policy: Policy, adapter_dir: Path, tmp_path: Path, make_batch
) -> None:
    config = TrainConfig(mini_batches=5)
    done = step(policy, adapter_dir, tmp_path / "out", make_batch(33), config)
    assert done.metrics["data/step_num_gradient_steps"] == 3
    assert done.notes == ["mini_batches is 5, and 3 groups are trained: each pass takes 3 optimizer steps"]


def gap_batch(
    policy: Policy,
    adapter_dir: Path,
    gap: float,
    num_tokens: int,
    step: int,
    advantages: dict[int, float] | None = None,
) -> Batch:
    """Two sequences of tokens that a record says were sampled at `step`, with the policy's log-probabilities moved by `gap`."""
    policy.load_adapter(LoRAConfig(), adapter_dir)
    rng = random.Random(0)
    sequences = []
    for _ in range(2):
        token_ids = [rng.randrange(128) for _ in range(num_tokens + 1)]
        own = policy.sequence_logprobs(token_ids).tolist()
        logprobs = [None, *(value - gap for value in own)]
        sequences.append(
            TokenSequence(
                token_ids=token_ids,
                logprobs=logprobs,
                spans=[SampledSpan(start=1, stop=num_tokens + 1, step=step)],
                advantages=advantages or {},
            )
        )
    trajectories = [
        TrainableTrajectory(reward=float(index), sequences=[sequence]) for index, sequence in enumerate(sequences)
    ]
    return Batch(groups=[TrainableGroup(trajectories=trajectories)])


LIMITS = MismatchLimits(high=0.01, wrong=0.04)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_wrong_gap_trains_nothing(policy: Policy, adapter_dir: Path, tmp_path: Path, passes: int) -> None:
    config = TrainConfig(passes=passes)
    batch = gap_batch(policy, adapter_dir, 0.05, 40, step=3)
    task = train_task(adapter_dir, tmp_path / "out", batch, config, start_step=3, mismatch_limits=LIMITS)
    with pytest.raises(GapTooLarge, match=r"0\.05 .*80 .*step 3"):
        train(policy, task, BUDGET, lambda _: None)
    assert not (tmp_path / "out").exists()
    # Without limits it is measured only.
    free = train_task(adapter_dir, tmp_path / "free", batch, config, start_step=3)
    done = train(policy, free, BUDGET, lambda _: None)
    assert done.metrics["loss/logprob_gap_mean"] == pytest.approx(0.05, abs=1e-5)
    assert done.metrics["loss/logprob_gap_num_tokens"] == 80


def test_the_gap_of_supervised_steps_is_over_all_of_them(policy: Policy, adapter_dir: Path, tmp_path: Path) -> None:
    """Two mini-batches: the first one's log-probabilities agree, the second one's do not."""
    weights = dict.fromkeys(range(1, 41), 1.0)
    batches = [gap_batch(policy, adapter_dir, gap, 40, step=3, advantages=weights) for gap in (0.0, 0.12)]
    batch = Batch(groups=[group for part in batches for group in part.groups])
    config = TrainConfig(objective="likelihood", batch_size=1)
    task = train_task(adapter_dir, tmp_path / "1", batch, config, start_step=3, mismatch_limits=LIMITS)
    with pytest.raises(GapTooLarge, match=r"0\.06 .*160 "):
        train(policy, task, BUDGET, lambda _: None)


def test_a_high_gap_is_noted_and_one_of_few_tokens_is_not_judged(
    policy: Policy, adapter_dir: Path, tmp_path: Path
) -> None:
    def run(name: str, gap: float, num_tokens: int, sampled_at: int) -> Done:
        batch = gap_batch(policy, adapter_dir, gap, num_tokens, sampled_at)
        out = tmp_path / name
        task = train_task(adapter_dir, out, batch, TrainConfig(), start_step=3, mismatch_limits=LIMITS)
        return train(policy, task, BUDGET, lambda _: None)

    (note,) = run("high", 0.02, 40, 3).notes
    assert "more than is usual" in note and "0.01" in note
    assert run("fine", 0.005, 40, 3).notes == []
    assert run("few", 0.5, 20, 3).notes == []
    stale = run("stale", 0.5, 40, 2)
    assert stale.notes == []
    assert stale.metrics["loss/logprob_gap_stale_mean"] == pytest.approx(0.5, abs=1e-5)
    assert stale.metrics["loss/logprob_gap_stale_allowance"] == 0.125
    assert "loss/logprob_gap_mean" not in stale.metrics
    with pytest.raises(GapTooLarge, match=r"1\.2 .*80 "):
        run("stale and wrong", 1.2, 40, 2)


def test_a_token_outside_of_the_set_that_it_was_sampled_from_is_refused(
    policy: Policy, adapter_dir: Path, tmp_path: Path
) -> None:
    kept = base64.b64encode(pack_set(np.array([7, 9]), 128)).decode()
    batch = gap_batch(policy, adapter_dir, 0.0, 3, step=0)
    sequence = batch.groups[0].trajectories[0].sequences[0]
    wrong = sequence.model_copy(update={"token_ids": [1, 2, 3, 8], "distributions": [-1, -1, -1, 0]})
    trajectories = [
        TrainableTrajectory(reward=0.0, sequences=[wrong]),
        batch.groups[0].trajectories[1],
    ]
    batch = Batch(groups=[TrainableGroup(trajectories=trajectories)], distributions=[Distribution(kept=kept)])
    with pytest.raises(ValueError, match="token 8"):
        step(policy, adapter_dir, tmp_path / "out", batch, TrainConfig())
