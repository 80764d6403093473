"""A sequence among strangers, as trees and as rows."""

from pathlib import Path

import torch

from art_protocol.wire import LoRAConfig
from art_server.trainer.batches import TrainSequence, make_micro_batches
from art_server.trainer.policy import Policy
from tests.makers.forests import save_random_adapter
from tests.makers.toy_models import ORIGINAL, WITHOUT_TREES, make_model

SHORT, LONG = ORIGINAL - 2, 5 * ORIGINAL


NUM_TARGETS = 12


def sequence(length: int, number: int, opening: list[int]) -> TrainSequence:
    """The last tokens are trained."""
    chance = torch.Generator().manual_seed(number)
    ids = opening + torch.randint(3, 1300, (length - len(opening),), generator=chance).tolist()
    positions = list(range(length - NUM_TARGETS - 1, length - 1))
    return TrainSequence(
        token_ids=ids[:-1],
        positions=positions,
        targets=[ids[position + 1] for position in positions],
        sampled_logprobs=[None] * NUM_TARGETS,
        distributions=[-1] * NUM_TARGETS,
        steps=[None] * NUM_TARGETS,
        advantages=[1.0] * NUM_TARGETS,
        trajectory=number,
        number=number,
    )


def of_first(policy: Policy, sequences: list[TrainSequence]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of the first sequence's targets, and the gradient of their sum."""
    (batch,) = make_micro_batches(sequences, 100_000, shared=policy.shares_prefixes)
    start = batch.sequences.index(0) * NUM_TARGETS
    indices = batch.predictions_S[start : start + NUM_TARGETS]
    logprobs = policy.logprobs(batch)[0][indices]
    logprobs.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in policy.parameters.items()}  # pyright: ignore[reportOptionalMemberAccess]
    policy.drop_gradients()
    return logprobs.detach(), gradients


ROUNDED = {"granite": 1e-5, "gemma4_text": 2e-5, "qwen3_5_text": 1e-5}
"""Families that enlarge float32's rounding of a gradient. gemma4, whose layers have inputs of their own: the same sequence
alone differs by 7e-6 as a tree and as a row. granite, which multiplies its embeddings and residuals, and qwen3_5, with its recurrent layers: 1.4e-6 beside others."""


def assert_own(name: str, folder: Path) -> None:
    policy = Policy(str(make_model(name, folder / "base")), torch.float32)
    policy.load_adapter(LoRAConfig(), save_random_adapter(policy, folder / "adapter"))
    opening = sequence(SHORT, 1, []).token_ids[:10]
    own = sequence(SHORT, 2, opening)
    strangers = [sequence(LONG, 3, []), sequence(LONG, 4, opening), sequence(SHORT, 5, [])]
    for shared in [False] if name in WITHOUT_TREES else [True, False]:
        policy.use_trees(shared)
        alone, gradients = of_first(policy, [own])
        beside, of_both = of_first(policy, [own, *strangers])
        assert (alone - beside).abs().max() <= 1e-6 * alone.abs().max(), shared
        for parameter, gradient in gradients.items():
            difference = (gradient - of_both[parameter]).abs().max()
            assert difference <= ROUNDED.get(name, 1e-6) * gradient.norm(), (parameter, shared)
