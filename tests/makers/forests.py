"""Random batches that share much, and what they mean when every row is trained alone with autograd of the loss."""

import base64
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.kept_set import pack_set, unpack_set
from art_server.shared.trainer_messages import (
    Batch,
    Distribution,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
)
from art_server.trainer.checkpoint import save_checkpoint
from art_server.trainer.job import train
from art_server.trainer.optimizer import make_optimizer
from art_server.trainer.policy import Policy

EXAMPLES = {
    "deadline": None,
    # Shrinking would take minutes, and a seed shrinks to nothing telling.
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
FORESTS = {
    "seed": st.integers(0, 100_000),
    "budget": st.integers(3, 600),
    "noise": st.sampled_from([1e-4, 0.05, 0.5]),
    "is_plain": st.booleans(),
}

VOCABULARY = 128


def save_random_adapter(policy: Policy, folder: Path) -> Path:
    """A checkpoint with the default LoRA whose B is not zero, so that every matrix has a gradient."""
    policy.init_adapter(LoRAConfig(), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=generator)
    save_checkpoint(policy, make_optimizer(policy.parameters, 1e-3), folder)
    return folder


def random_forest(policy: Policy, seed: int, noise: float, *, is_plain: bool = True) -> Batch:
    """Groups of 1 to 12 rollouts of 1 to 4 turns over two prompts. Completions open alike, thoughts are stripped from
    later contexts (then a trajectory goes on in another row), some are equal altogether.

    Sampled log-probabilities lie within `noise` of the policy's own. Not plain: half of the tokens are sampled with a
    temperature, a bias or a kept set.
    """
    rng = random.Random(seed)
    table: list[Distribution] = []

    def sampled_from(target: int) -> int:
        """What a token is sampled from: often the same as others at its place, so that tokens merge."""
        if is_plain or rng.random() < 0.5:
            return -1
        size = rng.choice([0, 3, 3, 100])
        kept = np.array(sorted({target, *random.Random(size).sample(range(VOCABULARY), size)}))
        drawn = Distribution(
            temperature=rng.choice([1.0, 0.5, 1.3]),
            logit_bias=rng.choice([{}, {}, {3: 1.5, target: -0.5}]),
            kept=base64.b64encode(pack_set(kept, VOCABULARY)).decode() if size else None,
        )
        if drawn not in table:
            table.append(drawn)
        return table.index(drawn)

    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 25))] for _ in range(2)]
    openings = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))] for _ in range(3)]

    def completion() -> list[int]:
        opening = rng.choice(openings)
        rest = [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 1, 3, 10]))]
        return opening[: rng.randint(1, len(opening))] + rest

    def trajectory(prompt: list[int]) -> TrainableTrajectory:
        strips = rng.random() < 0.5
        context = list(prompt)
        rows: list[tuple[list[int], list[bool]]] = []
        token_ids, is_trained = list(prompt), [False] * len(prompt)
        for _ in range(rng.randint(1, 4)):
            said = completion()
            token_ids, is_trained = token_ids + said, is_trained + [True] * len(said)
            tool = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))]
            if strips:
                rows.append((token_ids, is_trained))
                context = context + said[len(said) // 2 :] + tool
                token_ids, is_trained = list(context), [False] * len(context)
            else:
                token_ids, is_trained = token_ids + tool, is_trained + [False] * len(tool)
        if not strips:
            rows.append((token_ids, is_trained))
        reward, is_cut = rng.choice([0.0, 0.25, 1.0, rng.random()]), rng.random() < 0.2
        sequences = [_row(policy, rng, noise, *row, sampled_from, table) for row in rows]
        return TrainableTrajectory(
            reward=reward, sequences=[sequence.model_copy(update={"truncated": is_cut}) for sequence in sequences]
        )

    def group() -> TrainableGroup:
        prompt = rng.choice(prompts)
        return TrainableGroup(trajectories=[trajectory(prompt) for _ in range(rng.choice([1, 2, 3, 5, 12]))])

    groups = [group() for _ in range(rng.randint(1, 3))]
    # One group with signal at least.
    first = trajectory(prompts[0])
    second = trajectory(prompts[0])
    groups.append(
        TrainableGroup(
            trajectories=[
                TrainableTrajectory(reward=1.0, sequences=first.sequences),
                TrainableTrajectory(reward=0.0, sequences=second.sequences),
            ]
        )
    )
    return Batch(groups=groups, distributions=table)


def _row(
    policy: Policy,
    rng: random.Random,
    noise: float,
    token_ids: list[int],
    is_trained: list[bool],
    sampled_from: Callable[[int], int],
    table: list[Distribution],
) -> TokenSequence:
    drawn = [sampled_from(token) if trained else -1 for token, trained in zip(token_ids, is_trained, strict=True)]
    logprobs: list[float | None] = [None] * len(token_ids)
    trained = [index for index, was_sampled in enumerate(is_trained) if was_sampled and index]
    if trained:
        policy.use_trees(False)
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([token_ids])).logits[0].float()
        policy.use_trees(True)
        logits_NV = logits[[index - 1 for index in trained]]
        own_NV = plain_logprobs(logits_NV, [drawn[index] for index in trained], table)
        for index, own_V in zip(trained, own_NV, strict=True):
            logprobs[index] = float(own_V[token_ids[index]]) + rng.uniform(-noise, noise)
    return TokenSequence(token_ids=token_ids, logprobs=logprobs, distributions=drawn)


def plain_logprobs(logits_NV: torch.Tensor, drawn: list[int], table: list[Distribution]) -> torch.Tensor:
    """Row by row: the logits with their bias over the temperature, everything outside of the set at -60 below the rest."""
    rows = []
    for logits_V, index in zip(logits_NV, drawn, strict=True):
        if index < 0:
            rows.append(torch.log_softmax(logits_V, -1))
            continue
        distribution = table[index]
        bias_V = torch.zeros_like(logits_V)
        for token, value in distribution.logit_bias.items():
            bias_V[token] = value
        logits_V = (logits_V + bias_V) / distribution.temperature
        if distribution.kept is not None:
            is_out_V = torch.ones(VOCABULARY, dtype=torch.bool)
            is_out_V[torch.from_numpy(unpack_set(base64.b64decode(distribution.kept)))] = False
            logits_V = torch.where(is_out_V, logits_V.detach().min() - 60, logits_V)
        rows.append(torch.log_softmax(logits_V, -1))
    return torch.stack(rows)


@dataclass
class Alone:
    """The loss with every row on its own."""

    loss: float
    scale: float
    """Sum of the absolute shares of the loss: what relative errors refer to."""
    gradients: dict[str, torch.Tensor]
    row_norms: dict[str, float]
    """Sum over rows of the norm of each one's gradient."""


@dataclass
class Sequence:
    """A trajectory with signal: its trained tokens over all rows."""

    advantage: float
    logprobs: list[torch.Tensor]
    """Of each row, with a graph."""
    sampled: torch.Tensor
    reference: torch.Tensor
    entropies: list[torch.Tensor]


def train_rows_alone(policy: Policy, batch: Batch, config: TrainConfig) -> Alone:
    """The published formulas on separate rows, and autograd; the adapter must be loaded."""
    policy.use_trees(False)
    model = policy.model
    sequences: list[Sequence] = []
    for group in batch.groups:
        advantages = plain_advantages([trajectory.reward for trajectory in group.trajectories], config)
        if advantages is None:
            # Without signal the terms of KL and entropy are left.
            if not ((config.beta and config.kl_in == "loss") or config.entropy_bonus):
                continue
            advantages = [0.0] * len(group.trajectories)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            if config.overlong == "mask" and any(row.truncated for row in trajectory.sequences):
                continue
            sequence = Sequence(advantage, [], torch.zeros(0), torch.zeros(0), [])
            for row in trajectory.sequences:
                ids = torch.tensor([row.token_ids])
                trained = [i for i, value in enumerate(row.logprobs) if value is not None and i > 0]
                if not trained:
                    continue
                places, targets = [i - 1 for i in trained], ids[0, trained]
                drawn = [row.distributions[i] for i in trained]

                def scored(
                    ids: torch.Tensor = ids, places: list[int] = places, drawn: list[int] = drawn
                ) -> torch.Tensor:
                    logits_NV = model(input_ids=ids).logits[0, places].float()
                    return plain_logprobs(logits_NV, drawn, batch.distributions)

                all_logprobs = scored()
                sequence.logprobs.append(all_logprobs.gather(1, targets[:, None])[:, 0])
                sequence.entropies.append(-(all_logprobs.exp() * all_logprobs).sum(-1))
                sampled = torch.tensor([row.logprobs[i] for i in trained])
                sequence.sampled = torch.cat([sequence.sampled, sampled])
                if config.beta:
                    with torch.no_grad(), model.disable_adapter():
                        base = scored()
                    sequence.reference = torch.cat([sequence.reference, base.gather(1, targets[:, None])[:, 0]])
            if sequence.logprobs:
                sequences.append(sequence)
    if not sequences:
        policy.use_trees(True)
        return Alone(0.0, 0.0, {}, {})
    if config.scaling == "batch_std":
        values = torch.tensor(_all_advantages(batch, config))
        for sequence in sequences:
            sequence.advantage = float((sequence.advantage - values.mean()) / (values.std(correction=0) + 1e-6))
    # Leaves in between, so that each row's share of the gradient can be taken on its own.
    leaves = [[logprobs.detach().requires_grad_() for logprobs in sequence.logprobs] for sequence in sequences]
    num_tokens = sum(len(sequence.sampled) for sequence in sequences)
    shares = []
    for sequence, rows in zip(sequences, leaves, strict=True):
        losses = plain_losses(torch.cat(rows), sequence, config)
        if config.normalisation == "tokens":
            shares.append(losses / num_tokens)
        elif config.normalisation == "trajectory":
            shares.append(losses / len(losses) / len(sequences))
        else:
            shares.append(losses / config.constant_length / len(sequences))
    terms = torch.cat(shares)
    loss = terms.sum()
    loss.backward()
    total = float(loss.detach())

    parameters = policy.parameters
    gradients = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    norms = dict.fromkeys(parameters, 0.0)
    for sequence, rows in zip(sequences, leaves, strict=True):
        weight = _entropy_weight(sequence, num_tokens, len(sequences), config)
        for logprobs, entropies, leaf in zip(sequence.logprobs, sequence.entropies, rows, strict=True):
            assert leaf.grad is not None
            objective = (leaf.grad * logprobs).sum() - weight * entropies.sum()
            total -= float(weight * entropies.sum().detach())
            parts = torch.autograd.grad(objective, list(parameters.values()))
            for name, part in zip(parameters, parts, strict=True):
                gradients[name] += part
                norms[name] += float(part.norm())
    policy.use_trees(True)
    return Alone(total, float(terms.detach().abs().sum()), gradients, norms)


def _entropy_weight(sequence: Sequence, num_tokens: int, num_sequences: int, config: TrainConfig) -> float:
    if config.normalisation == "tokens":
        return config.entropy_bonus / num_tokens
    if config.normalisation == "trajectory":
        return config.entropy_bonus / len(sequence.sampled) / num_sequences
    return config.entropy_bonus / config.constant_length / num_sequences


def plain_advantages(rewards: list[float], config: TrainConfig) -> list[float] | None:
    """Before scaling over the batch."""
    values = torch.tensor(rewards, dtype=torch.float64)
    if (values == values[0]).all():
        return None
    if config.baseline == "leave_one_out":
        others = [values[torch.arange(len(values)) != i].mean() for i in range(len(values))]
        advantages = values - torch.stack(others)
    else:
        advantages = values - values.mean()
    if config.scaling == "group_std":
        advantages = advantages / (values.std(correction=0) + 1e-6)
    return advantages.tolist()


def _all_advantages(batch: Batch, config: TrainConfig) -> list[float]:
    return [
        value
        for group in batch.groups
        for value in plain_advantages([trajectory.reward for trajectory in group.trajectories], config) or []
    ]


def plain_losses(logprobs: torch.Tensor, sequence: Sequence, config: TrainConfig) -> torch.Tensor:
    """Of each token of a trajectory, before normalisation."""
    advantage = sequence.advantage
    old = logprobs.detach()
    compared = logprobs - (sequence.sampled if config.ratio_to == "sampled" else old)
    own, whole = compared.exp(), compared.mean().exp()
    ratios = {"token": own, "sequence": whole + 0 * own, "geometric": (own * whole).sqrt()}
    ratio = ratios[config.ratio]
    low = 1 - config.epsilon
    high = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    if config.clip == "cispo":
        objective = ratio.detach().clamp(low, high) * advantage * logprobs
    elif config.clip == "none":
        objective = ratio * advantage
    elif advantage >= 0:
        objective = ratio.clamp(max=high) * advantage
    else:
        bounded = ratio.clamp(max=config.dual_clip) if config.clip == "dual" else ratio
        objective = bounded.clamp(min=low) * advantage
    if config.correction != "off":
        weight = (old - sequence.sampled).exp()
        if config.correction == "sequence_mask":
            weight = (old - sequence.sampled).mean().exp() + 0 * weight
        inside = (weight >= config.correction_low) & (weight <= config.correction_high)
        if config.correction == "truncate":
            weight = torch.minimum(weight, torch.tensor(config.correction_high))
        else:
            weight = torch.where(inside, weight, 0.0)
        objective = weight * objective
    losses = -objective
    if config.beta:
        difference = sequence.reference - logprobs
        kl = {"k1": -difference, "k2": difference**2 / 2, "k3": difference.exp() - difference - 1}
        losses = losses + config.beta * kl[config.kl_estimator]
    return losses


def assert_tree_equals_rows(
    started: tuple[Policy, Path],
    folder: Path,
    config: TrainConfig,
    seed: int,
    budget: int,
    noise: float,
    is_plain: bool,
    tolerance: float = 1e-5,
) -> None:
    """Trains the same batch in trees and row by row. `started`: the policy and a checkpoint with the default LoRA."""
    policy, adapter_dir = started
    policy.load_adapter(LoRAConfig(), adapter_dir)
    policy.tree_gap = None
    batch = random_forest(policy, seed, noise, is_plain=is_plain)
    alone = train_rows_alone(policy, batch, config)
    task = TrainTask(
        lora=LoRAConfig(), in_dir=str(adapter_dir), out_dir=str(folder / "out"), config=config, batch=batch
    )
    done = train(policy, task, budget, lambda _: None)
    assert done.metrics.get("data/step_is_shared", 1.0) == 1.0
    if not alone.scale:
        assert not done.metrics.get("loss/train")
        return
    assert abs(done.metrics["loss/train"] - alone.loss) <= tolerance * max(alone.scale, abs(alone.loss))
    # Where every weighted token sees a single one, queries and keys have no gradient: both sides hold rounding there.
    rounding = torch.finfo(torch.float32).eps * max(alone.row_norms.values())
    for name, parameter in policy.parameters.items():
        assert parameter.grad is not None
        difference = float((parameter.grad - alone.gradients[name]).norm())
        assert difference <= tolerance * alone.row_norms[name] + rounding, name
