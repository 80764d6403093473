"""Is a tree the same as its rows? Asked once for each model, of its first batch, and answered before it trains.

An architecture that mixes tokens outside attention (state-space layers, convolutions) or makes its logits in a way of
its own shows here, whatever its name: the trainer then takes unshared rows and says so.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from art_server.trainer.batches import MicroBatch, TrainRow
from art_server.trainer.distributions import RAW
from art_server.trainer.policy import Policy

logger = logging.getLogger(__name__)

MAX_CHECKED_TOKENS = 256
"""Rows up to this many tokens are compared, at least two; the model's first step waits for it."""

MAX_CHECKED_PLACES = 32
"""About so many places of a row: the model's own logits take positions x vocabulary."""

MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Between log-probabilities: the largest in float32, where sums in another order differ by 1e-5; the mean below that,
where rounding alone brings single tokens apart by tenths."""


def check_trees(policy: Policy, batch: MicroBatch, rows: list[TrainRow]) -> str | None:
    """Compare the trees of some rows with these one by one; None where they agree, else what is different.

    Leaves the policy on trees or on unshared rows accordingly.
    """
    try:
        policy.tree_gap = _gap(policy, batch, rows)
    except NotImplementedError as error:
        return _give_up(policy, str(error))
    if policy.tree_gap <= MAX_GAP[policy.dtype]:
        return None
    return _give_up(
        policy, f"log-probabilities differ by {policy.tree_gap:.2g} from those of single rows"
    )


def check_rows(policy: Policy, batch: MicroBatch, rows: list[TrainRow]) -> None:
    """The same for unshared rows, which have nothing to fall back on.

    Raises ValueError where they differ.
    """
    policy.row_gap = _gap(policy, batch, rows)
    if not policy.row_gap <= MAX_GAP[policy.dtype]:
        raise ValueError(
            f"--trainer {policy.name} computes another policy than {policy.base_model}: log-probabilities differ by "
            f"{policy.row_gap:.2g} from those of transformers with the same weights, and at most {MAX_GAP[policy.dtype]:.2g} is "
            "rounding. Nothing was trained; use --trainer peft"
        )


@torch.no_grad()
def _gap(policy: Policy, batch: MicroBatch, rows: list[TrainRow]) -> float:
    """Between the log-probabilities of a micro-batch and those of its rows one by one (`Policy.row_logprobs`)."""
    raw = replace(batch, distributions_N=torch.full_like(batch.distributions_N, RAW))
    logprobs_N, _ = policy.logprobs(raw)
    differences: list[torch.Tensor] = []
    sizes = [len(rows[index].targets) for index in batch.rows]
    for indices, index in zip(batch.predictions_U.split(sizes), batch.rows, strict=True):
        row = rows[index]
        chosen = torch.arange(0, len(indices), max(1, len(indices) // MAX_CHECKED_PLACES))
        positions = [row.positions[each] for each in chosen.tolist()]
        expected = policy.row_logprobs([*row.token_ids, row.targets[-1]], positions)
        differences.append((logprobs_N[indices[chosen].to(logprobs_N.device)] - expected).abs())
    gaps = torch.cat(differences)
    return float(gaps.max() if policy.dtype == torch.float32 else gaps.mean())


def rows_to_check(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """The longest row, and those that share most with it."""
    longest = max((row.token_ids for row in rows), key=len)

    def num_shared(row: TrainRow) -> int:
        pairs = enumerate(zip(row.token_ids, longest, strict=False))
        return next((i for i, (one, other) in pairs if one != other), len(row.token_ids))

    chosen: list[TrainRow] = []
    num_tokens = 0
    for row in sorted(rows, key=num_shared, reverse=True):
        num_tokens += len(row.token_ids)
        if len(chosen) >= 2 and num_tokens > MAX_CHECKED_TOKENS:
            break
        chosen.append(row)
    return chosen


def _give_up(policy: Policy, reason: str) -> str:
    policy.use_trees(False)
    logger.warning("%s: rows are trained one by one: %s", policy.base_model, reason)
    return f"prefixes are not shared for {policy.base_model}: {reason}"
