"""How many tokens a micro-batch of a job has: fewer after memory ran out, in this job and in later ones."""

import gc
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from art_server.process.shared.trainer_messages import TrainTask
from art_server.store import files
from art_server.trainer.memory import device_memory, is_out_of_memory
from art_server.trainer.policy import Policy

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_TOKENS_PER_MICRO_BATCH = 64
"""The budget is not halved below this: the task fails instead."""


class Budgets:
    """Token budgets that fitted after memory ran out, by device, base, adapter rank and longest sequence.

    They are in one JSON file, so that later jobs and servers do not fail again; delete it to retry larger budgets. With
    `file` None nothing is stored.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def find(self, key: str) -> int | None:
        return self._read().get(key)

    def learn(self, key: str, tokens: int) -> None:
        if self.file is not None:
            files.write_json(self.file, self._read() | {key: tokens})

    def _read(self) -> dict[str, int]:
        if self.file is None or not self.file.exists():
            return {}
        return json.loads(self.file.read_text())


class TryAgainWithLess(Exception):
    """Memory ran out on a rank, whose passes others wait for."""


@dataclass(slots=True)
class TokenBudget:
    """The tokens of a micro-batch for one job, halved after each failed allocation."""

    policy: Policy
    notes: list[str]
    tokens: int
    most: int = 0
    """What an earlier job left, or the start's limit: fewer tokens than this are worth storing."""
    key: str = ""
    has_checkpointing: bool = False
    """Gradient checkpointing is on from the start."""
    num_retries: int = 0
    learned: Budgets | None = None

    @classmethod
    def of_job(
        cls,
        policy: Policy,
        task: TrainTask,
        max_tokens: int,
        longest: int,
        learned: Budgets,
        notes: list[str],
    ) -> "TokenBudget":
        """The budget that a job starts with, for sequences of up to `longest` tokens. It switches gradient
        checkpointing on or off."""
        key = budget_key(policy.device, policy.base_model, task.lora.rank, longest)
        fitted = learned.find(key)
        most = min(max_tokens, fitted or max_tokens)
        tokens = max(1, most // task.budget_divisor)
        has_checkpointing = task.checkpointing or fitted is not None or task.budget_divisor > 1
        policy.use_checkpointing(has_checkpointing)  # an earlier job may have switched it on
        if fitted is not None:
            notes.append(
                f"{tokens} tokens at a time, with gradient checkpointing: an earlier job ran out of memory with more. "
                f"{learned.file} stores this limit; delete the file to try more tokens again"
            )
        if task.budget_divisor > 1:
            notes.append(
                f"{tokens} tokens at a time, with gradient checkpointing: the trainer's process died several times"
            )
        return cls(policy, notes, tokens, most, key, has_checkpointing, learned=learned)

    def run(self, compute: Callable[[int], T]) -> T:
        """Returns `compute(tokens)`. When it runs out of memory, it is retried with half the tokens and gradient
        checkpointing. Ranks that share the base's weights are started again for that.

        Raises:
            TryAgainWithLess: the job would fit with the tokens that are stored now.
        """
        # With gradient checkpointing a budget counts more: it then fits `checkpointing_factor` times as many tokens.
        least = max(1.0, MIN_TOKENS_PER_MICRO_BATCH / max(1.0, self.policy.checkpointing_factor))
        while True:
            try:
                return compute(self.tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.tokens // 2 < least:
                    raise
                if self.policy.gang.is_sharded:
                    assert self.learned is not None, "a job stores what fits"
                    self.learned.learn(self.key, self.tokens // 2)
                    raise TryAgainWithLess(f"{error}; the next try has {self.tokens // 2} tokens at a time") from error
            # Outside the handler, whose traceback keeps the failed step's tensors alive.
            self.tokens, self.num_retries = self.tokens // 2, self.num_retries + 1
            self.policy.use_checkpointing(True)
            gc.collect()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self.notes.append(f"out of memory: tried again with {self.tokens} tokens at a time")
            logger.warning(self.notes[-1])

    def store(self, learned: Budgets) -> None:
        """Stores what fitted after memory ran out."""
        if self.tokens < self.most:
            learned.learn(self.key, self.tokens)


def budget_key(device: torch.device, base_model: str, rank: int, longest_sequence: int) -> str:
    """The key of a budget. The longest sequence is rounded up to a power of two."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    length = 1 << (longest_sequence - 1).bit_length()
    return f"{name}, {device_memory(device)} bytes; {base_model}; rank {rank}; rows of {length}"
