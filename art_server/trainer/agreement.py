"""What the ranks of a gang agree on before they compute (`gang_view.py`): no rank may follow its own machine's numbers.

What cannot be made equal (`facts.py`) is compared by the server before the ranks meet. Before each job the first rank decides
what the plan depends on, and all ranks take its terms (`agree_on_terms`). Before the first pass over a plan the ranks compare its
digests (`check_plan`): where plans differ, two ranks compute some tokens and no rank computes others, which makes another
gradient without an error.

A gang of one exchanges nothing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

from art_server.shared.trainer_messages import TrainerMessage
from art_server.trainer.batches import MicroBatch
from art_server.trainer.gang_view import check_alike
from art_server.trainer.memory import device_memory
from art_server.trainer.policy import Policy


class Terms(TrainerMessage):
    """What the plan of a job depends on beside the job itself."""

    max_tokens: int
    """Tokens of a micro-batch, unless an earlier job has stored a smaller budget."""
    device: str
    """The kinds of the ranks' devices, under which token budgets are stored."""
    memory: int
    """Bytes of the smallest device."""
    checkpointing_factor: float
    fill_tokens: int | None
    shares_prefixes: bool
    has_tried_trees: bool
    tree_gap: float | None
    sequence_gap: float | None
    facts: dict[str, str]
    """What must be equal on all ranks, by name."""


def agree_on_terms(policy: Policy, max_tokens: int) -> Terms:
    """The terms of a job: the first rank's, with the number of tokens that fits every rank. The policy has them from here on.

    Raises:
        UnlikeRanks: the ranks' policies differ in facts that no rank can change.
    """
    own = Terms(
        max_tokens=max_tokens,
        device=device_name(policy.device),
        memory=device_memory(policy.device),
        checkpointing_factor=policy.checkpointing_factor,
        fill_tokens=policy.fill_tokens,
        shares_prefixes=policy.shares_prefixes,
        has_tried_trees=policy.has_tried_trees,
        tree_gap=policy.tree_gap,
        sequence_gap=policy.sequence_gap,
        facts=policy.facts,
    )
    if policy.gang.size == 1:
        return own
    of_ranks = [Terms.model_validate_json(text) for text in policy.gang.gather(own.model_dump_json())]
    check_alike(policy.gang.machines, [terms.facts for terms in of_ranks])
    agreed = of_ranks[0].model_copy(
        update={
            "max_tokens": min(terms.max_tokens for terms in of_ranks),
            "memory": min(terms.memory for terms in of_ranks),
            # A part of a stored budget's key: a budget of unlike cards counts for none of them alone.
            "device": " and ".join(sorted({terms.device for terms in of_ranks})),
        }
    )
    policy.checkpointing_factor = agreed.checkpointing_factor
    policy.fill_tokens = agreed.fill_tokens
    # A check is a pass that all ranks make. After an error a rank may have loaded its base again, and would check alone.
    policy.has_tried_trees = agreed.has_tried_trees
    policy.tree_gap, policy.sequence_gap = agreed.tree_gap, agreed.sequence_gap
    if policy.shares_prefixes != agreed.shares_prefixes:
        policy.use_trees(agreed.shares_prefixes)
    return agreed


def check_plan(policy: Policy, micro_batches: Sequence[MicroBatch], max_tokens: int) -> None:
    """Checks that all ranks have planned the same micro-batches, for the same ranks, to be computed in the same way.

    Advantages are left out: they come from the job, and their last bits may depend on the processor.

    Raises:
        UnlikeRanks: the plans differ.
    """
    gang = policy.gang
    if gang.size == 1:
        return
    facts = plan_facts(policy, micro_batches, max_tokens)
    check_alike(gang.machines, [json.loads(text) for text in gang.gather(json.dumps(facts))])


def plan_facts(policy: Policy, micro_batches: Sequence[MicroBatch], max_tokens: int) -> Mapping[str, str]:
    """All that a plan's gradient depends on beside weights and advantages, by name, in words or as a digest."""
    tokens, uses = hashlib.sha256(), hashlib.sha256()
    for batch in micro_batches:
        forest = batch.forest
        for values in (forest.token_ids_T, forest.positions_T, forest.ends_T):
            tokens.update(_content(values))
        for values in (
            *(batch.forest_indices_N, batch.targets_N, batch.distributions_N, batch.taught_N),
            *(batch.indices_S, batch.predictions_S),
        ):
            uses.update(_content(values))
        uses.update(f"{batch.sequences} {batch.is_shared}".encode())
    shares = policy.gang.shares([batch.num_tokens for batch in micro_batches])
    return policy.facts | {
        "tokens at a time": str(max_tokens),
        "tokens of small trees": str(policy.fill_tokens),
        "gradient checkpointing": str(policy.uses_checkpointing),
        "shared prefixes": str(policy.shares_prefixes),
        "number of micro-batches": str(len(micro_batches)),
        "tokens": tokens.hexdigest()[:16],
        "uses of tokens": uses.hexdigest()[:16],
        "micro-batches of ranks": hashlib.sha256(str(shares).encode()).hexdigest()[:16],
    }


def _content(values: torch.Tensor) -> bytes:
    """A tensor's shape, number type and numbers, for a digest."""
    return f"{tuple(values.shape)} {values.dtype} ".encode() + values.contiguous().numpy().tobytes()


def device_name(device: torch.device) -> str:
    """The kind of a device, under which token budgets are stored."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
