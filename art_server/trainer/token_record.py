"""The record of a step's tokens, `tokens.safetensors`: what the trainer computed for each of them, for people to read.

T are the tokens of all the job's sequences, one after another. Tensors: token_ids_T (int32), sampled_logprobs_T,
trainer_logprobs_T, advantages_T, ratios_T, entropies_T (float32, NaN where a token has no number: only trained tokens have all
numbers) and is_clipped_T (uint8). The metadata has `groups`, JSON of each group's number, trajectories and sequences
[start, stop), and `texts`, JSON from token ids to their text.
"""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from art_server.shared.trainer_messages import Batch
from art_server.store.model_folder import TOKENS_FILE
from art_server.trainer.batches import TrainSequence

NUMBERS = ("trainer_logprobs", "advantages", "ratios", "entropies")


class TokenRecord:
    """Collects a job's numbers by token. A later optimizer step's ratios and entropies replace earlier ones."""

    def __init__(self, batch: Batch, base_model: str):
        self._batch = batch
        self._base_model = base_model
        self._token_ids: list[int] = []
        self._firsts = [0]
        """The index of each sequence's first token, and at the end the number of all tokens."""
        sampled: list[float] = []
        for group in batch.groups:
            for trajectory in group.trajectories:
                for sequence in trajectory.sequences:
                    self._token_ids += sequence.token_ids
                    self._firsts.append(len(self._token_ids))
                    sampled += [math.nan if value is None else value for value in sequence.logprobs]
        num = len(self._token_ids)
        self._tensors = {name: torch.full((num,), math.nan, dtype=torch.float32) for name in NUMBERS}
        self._tensors["sampled_logprobs"] = torch.tensor(sampled, dtype=torch.float32)
        self._tensors["is_clipped"] = torch.zeros(num, dtype=torch.uint8)

    def add(
        self,
        sequences: Sequence[TrainSequence],
        start_logprobs_S: torch.Tensor,
        **of_step: torch.Tensor,
    ) -> None:
        """Adds an optimizer step over these sequences' S tokens: the trainer's log-probabilities at the start of the
        job, and by name `ratios`, `entropies` and `is_clipped`."""
        indices: list[int] = []
        advantages: list[float] = []
        for sequence in sequences:
            first = self._firsts[sequence.number] + 1
            indices += [first + position for position in sequence.positions]
            advantages += sequence.advantages
        indices_S = torch.tensor(indices)
        numbers = {"trainer_logprobs": start_logprobs_S, "advantages": torch.tensor(advantages)}
        for name, values_S in {**numbers, **of_step}.items():
            self._tensors[name][indices_S] = values_S.to(self._tensors[name].dtype).cpu()

    def write(self, folder: Path) -> None:
        """Writes the file into a folder, which the caller syncs to disk."""
        tensors = {f"{name}_T": values for name, values in self._tensors.items()}
        tensors["token_ids_T"] = torch.tensor(self._token_ids, dtype=torch.int32)
        metadata = {"groups": json.dumps(self._groups()), "texts": json.dumps(self._texts())}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / TOKENS_FILE, metadata)

    def _groups(self) -> list[dict[str, object]]:
        ranges = itertools.pairwise(self._firsts)
        groups: list[dict[str, object]] = []
        for index, group in enumerate(self._batch.groups):
            number = index if group.number is None else group.number
            trajectories = [
                list(itertools.islice(ranges, len(trajectory.sequences))) for trajectory in group.trajectories
            ]
            groups.append({"number": number, "trajectories": trajectories})
        return groups

    def _texts(self) -> dict[int, str]:
        """The text of each token that occurs. A token that is part of a character has the vocabulary's spelling. Empty
        without a tokenizer."""
        file = Path(self._base_model) / "tokenizer.json"
        if not file.exists():
            return {}
        tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        texts: dict[int, str] = {}
        for token in sorted(set(self._token_ids)):
            text = tokenizer.decode([token], skip_special_tokens=False)
            if "\ufffd" in text:
                text = tokenizer.id_to_token(token) or ""
            texts[token] = text
        return texts
