"""What the ranks of a gang agree on before they compute (`gang.py`): no rank may follow its own machine's numbers.

What cannot be made equal is compared where the ranks meet (`own_facts`). Before each job the first rank decides what the plan
depends on, and all take it (`agree_on_terms`). Before the first pass over a plan its digest is compared (`check_plan`): where
plans differ, two ranks compute some tokens and none computes others, which makes another gradient without an error.

A gang of one exchanges nothing.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import torch

from art_server import __version__
from art_server.process.shared.trainer_messages import TrainerMessage
from art_server.trainer.attention import default_kind
from art_server.trainer.batches import MicroBatch
from art_server.trainer.gang import check_alike
from art_server.trainer.memory import device_memory
from art_server.trainer.policy import Policy


class Terms(TrainerMessage):
    """What the plan of a job depends on beside the job itself."""

    max_tokens: int
    """Tokens of a micro-batch before anything was learned."""
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
    """What all ranks must have alike."""


def own_facts(device: torch.device, dtype: torch.dtype, trainer: str, *, is_sharded: bool) -> dict[str, str]:
    """What a rank cannot change, and all ranks must have alike, by name.

    Versions have their build tags: another build has other kernels and another NCCL. Cards may differ, but not where they share
    the weights: whether attention compiles depends on the card, and a rank that fails alone would leave the others in a pass.
    """
    facts = {
        "device": device.type,
        "number type": str(dtype).removeprefix("torch."),
        "attention": default_kind(device),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE", "unset"),
        "trainer": trainer,
        "torch": torch.__version__,
        **{name: version(name) for name in ("transformers", "peft")},
        "agent-reinforcement-trainer": __version__,
    }
    if is_sharded and device.type == "cuda":
        facts["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return facts


def agree_on_terms(policy: Policy, max_tokens: int) -> Terms:
    """The terms of a job, which the policy has from here on: those of the first rank, with the tokens that fit every rank.

    Raises:
        UnlikeRanks: the ranks' policies differ in what nobody can change.
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
            "device": " and ".join(sorted({terms.device for terms in of_ranks})),
        }
    )
    policy.checkpointing_factor = agreed.checkpointing_factor
    policy.fill_tokens = agreed.fill_tokens
    policy.has_tried_trees = agreed.has_tried_trees
    policy.tree_gap, policy.sequence_gap = agreed.tree_gap, agreed.sequence_gap
    if policy.shares_prefixes != agreed.shares_prefixes:
        policy.use_trees(agreed.shares_prefixes)
    return agreed


def check_plan(policy: Policy, micro_batches: Sequence[MicroBatch], max_tokens: int) -> None:
    """Checks that all ranks have planned the same micro-batches, with the same rank for each, to be computed alike.

    Advantages are left out: they come from the job, and their last bits may depend on the processor.

    Raises:
        UnlikeRanks: they have not.
    """
    gang = policy.gang
    if gang.size == 1:
        return
    facts = plan_facts(policy, micro_batches, max_tokens)
    text = json.dumps(facts)
    digests = gang.gather(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) > 1:
        check_alike(gang.machines, [json.loads(of_rank) for of_rank in gang.gather(text)])


def plan_facts(policy: Policy, micro_batches: Sequence[MicroBatch], max_tokens: int) -> Mapping[str, str]:
    """All that a plan's gradient depends on beside weights and advantages, by name, in words or as a digest."""
    tokens, uses = hashlib.sha256(), hashlib.sha256()
    for batch in micro_batches:
        forest = batch.forest
        for values in (forest.token_ids_T, forest.positions_T, forest.ends_T):
            tokens.update(_content(values))
        for values in (
            *(batch.forest_indices_N, batch.targets_N, batch.distributions_N),
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
    """Numbers with their shape, for a digest."""
    return f"{tuple(values.shape)} {values.dtype} ".encode() + values.contiguous().numpy().tobytes()


def device_name(device: torch.device) -> str:
    """The kind of a device, as budgets are stored under it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
