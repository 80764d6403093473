"""How many tokens a micro-batch of a job has: fewer after memory ran out, in this job and in later ones."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from art_server.shared.trainer_messages import TrainTask
from art_server.trainer.agreement import Terms
from art_server.trainer.gang_view import NoMemoryOnSomeRank
from art_server.trainer.memory import is_out_of_memory
from art_server.trainer.policy import Policy

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_TOKENS_PER_MICRO_BATCH = 64
"""The budget is not halved below this: the task fails instead."""


Learn = Callable[[str, int], None]
"""Has the server store which budget fitted, by its key."""


def learn_nothing(key: str, tokens: int) -> None:
    """For a job whose token budget nobody stores."""


class TryAgainWithLess(Exception):
    """Memory ran out on a rank for whose passes other ranks wait."""


@dataclass(slots=True)
class TokenBudget:
    """The tokens of a micro-batch for one job, halved after each failed allocation."""

    policy: Policy
    notes: list[str]
    tokens: int
    most: int = 0
    """The limit before the job: an earlier job's stored budget, or the default. Fewer tokens than this are worth storing."""
    key: str = ""
    has_checkpointing: bool = False
    """Whether gradient checkpointing is on from the start."""
    num_retries: int = 0
    learn: Learn = learn_nothing

    @classmethod
    def of_job(
        cls,
        policy: Policy,
        task: TrainTask,
        terms: Terms,
        base_name: str,
        longest: int,
        notes: list[str],
        learn: Learn,
    ) -> "TokenBudget":
        """The budget that a job starts with, for sequences of up to `longest` tokens. Switches gradient checkpointing
        on or off."""
        key = budget_key(terms.device, terms.memory, base_name, task.lora.rank, longest)
        fitted = task.budgets.get(key)
        most = min(terms.max_tokens, fitted or terms.max_tokens)
        tokens = max(1, most // task.budget_divisor)
        has_checkpointing = task.checkpointing or fitted is not None or task.budget_divisor > 1
        policy.use_checkpointing(has_checkpointing)  # an earlier job may have switched it on
        if fitted is not None:
            notes.append(
                f"{tokens} tokens at a time, with gradient checkpointing: an earlier job ran out of memory with more. "
                "the server stores this limit in .server/budgets.json under its --path; delete the file to try more tokens "
                "again"
            )
        if task.budget_divisor > 1:
            notes.append(
                f"{tokens} tokens at a time, with gradient checkpointing: the trainer's process died several times"
            )
        return cls(policy, notes, tokens, most, key, has_checkpointing, learn=learn)

    def run(self, compute: Callable[[int], T]) -> T:
        """Returns `compute(tokens)`. When `compute` runs out of memory, it is called again with half the tokens and gradient
        checkpointing. Several ranks do so only where all of them know of the failure: a rank that tried again alone would
        compute another plan. Ranks that share the base's weights are started again instead.

        Raises:
            TryAgainWithLess: the job would fit with the tokens that are stored now.
        """
        # With gradient checkpointing `checkpointing_factor` times the budget fits (`checking.py`), so the budget may be lower.
        least = max(1.0, MIN_TOKENS_PER_MICRO_BATCH / max(1.0, self.policy.checkpointing_factor))
        while True:
            try:
                return compute(self.tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.tokens // 2 < least:
                    raise
                gang = self.policy.gang
                if gang.is_sharded:
                    self.learn(self.key, self.tokens // 2)
                    raise TryAgainWithLess(f"{error}; the next try has {self.tokens // 2} tokens at a time") from error
                if gang.size > 1 and not isinstance(error, NoMemoryOnSomeRank):
                    raise
            # Outside the handler, whose traceback keeps the failed step's tensors alive.
            self.tokens, self.num_retries = self.tokens // 2, self.num_retries + 1
            self.policy.use_checkpointing(True)
            gc.collect()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self.notes.append(f"out of memory: tried again with {self.tokens} tokens at a time")
            logger.warning(self.notes[-1])

    def store(self) -> None:
        """Stores what fitted after memory ran out."""
        if self.tokens < self.most:
            self.learn(self.key, self.tokens)


def budget_key(device: str, memory: int, base_name: str, rank: int, longest_sequence: int) -> str:
    """The key of a budget. The longest sequence is rounded up to a power of two."""
    length = 1 << (longest_sequence - 1).bit_length()
    return f"{device}, {memory} bytes; {base_name}; rank {rank}; rows of {length}"
