"""Entries: what each token was sampled from, as vLLM's model runner process sends it to the process of vLLM's APIs.

An entry is a list of int32, because vLLM's field for sampling masks carries it (`kept_sets.py`). The first word is the
number of the token's kept set, -1 for the whole vocabulary; the second is the float32 log-probability, bit by bit. The
first entry with a number also contains the set: the byte of its form (`shared/kept_set.py`) in one word, then the
packed words. Numbers count the distinct sets of one choice. A request that needs no entries has empty entries.

Imports no torch: vLLM must be imported before torch.
"""

import array
import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from art_server.shared.kept_set import LIST, MASK

MIN_TEMPERATURE = 1e-5
"""Below this temperature vLLM samples greedily. Source: vllm/v1/sample/sampler.py, _SAMPLING_EPS."""

LogprobSource = Literal["raw", "whole", "cut", "unknown"]


def logprob_source(params: Any) -> LogprobSource:
    """Where the log-probabilities of a request's tokens under the behaviour policy come from.

    "raw": the model's own. "whole" and "cut": the entries, which for "cut" also contain the kept sets.
    "unknown": temperature, bias and kept set do not describe the distribution.
    """
    if (
        params.temperature < MIN_TEMPERATURE
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.thinking_token_budget is not None
    ):
        return "unknown"
    if (
        params.top_k > 0
        or params.top_p < 1.0
        or params.min_p > 0.0
        or params.structured_outputs is not None
        or params.min_tokens > 0
        or params.bad_words
        or params.allowed_token_ids is not None
    ):
        return "cut"
    return "whole" if params.temperature != 1.0 or params.logit_bias else "raw"


class BehaviourLogprobs(NamedTuple):
    """`sampled_logprobs`, `kept` and `sets` of one choice's `Record`."""

    logprobs: list[float] | None
    kept: list[int]
    sets: list[bytes]


def read_choice(source: LogprobSource, raw: list[float], entries: Sequence[Sequence[int]]) -> BehaviourLogprobs:
    """What a choice was sampled from, read from its raw log-probabilities and the entries of its tokens."""
    unknown = BehaviourLogprobs(None, [], [])
    if source == "unknown" or not all(map(math.isfinite, raw)):
        return unknown
    if source == "raw":
        return BehaviourLogprobs(raw, [], [])
    kept: list[int] = []
    bits: list[int] = []
    sets: list[bytes] = []
    for entry in entries:
        if len(entry) > 2 and entry[0] == len(sets):
            sets.append(bytes([entry[2]]) + array.array("i", entry[3:]).tobytes())
        # An entry is missing where the model runner could not make it (`SamplerStep.fill`).
        if len(entry) < 2 or entry[0] >= len(sets):
            return unknown
        kept.append(entry[0])
        bits.append(entry[1])
    logprobs = np.array(bits, dtype=np.int32).view(np.float32)
    if len(entries) != len(raw) or not np.isfinite(logprobs).all():
        return unknown
    return BehaviourLogprobs(logprobs.tolist(), kept if sets else [], sets)


class KeptSets:
    """The kept sets of R rows: as bits, and as ids where the ids are shorter."""

    def __init__(self, bits_RW: np.ndarray, num_vocabulary: int):
        """bits_RW: uint64, one bit for each token, lowest first, 0 above the vocabulary."""
        self.counts_R = np.bitwise_count(bits_RW).sum(axis=1, dtype=np.int64)
        self.is_whole_R = self.counts_R == num_vocabulary
        self.is_listed_R = (self.counts_R * 32 <= num_vocabulary) & (self.counts_R > 0)
        self.masks_R = bits_RW.view(np.int32)[:, : -(-num_vocabulary // 32)]
        self.ends = np.cumsum(np.where(self.is_listed_R, self.counts_R, 0))
        """For each row, the end of the row's ids in `ids`."""
        self.ids = np.empty(0, dtype=np.int32)
        """Ids of the rows with `is_listed_R`, one row after the other, ascending in each."""
        if not self.is_listed_R.any():
            return
        listed = bits_RW[self.is_listed_R].ravel()
        words = np.flatnonzero(listed)
        flags = np.unpackbits(listed[words].view(np.uint8), bitorder="little")
        positions = np.flatnonzero(flags.view(np.bool_))
        self.ids = (words[positions >> 6] % bits_RW.shape[1] * 64 + (positions & 63)).astype(np.int32)


class SampledRows(NamedTuple):
    """Log-probabilities and kept sets of R rows after sampling, on the CPU."""

    logprobs_R: np.ndarray
    """float32: the log-probability of each row's sampled token."""
    kept: KeptSets | None
    """None if no row's set is cut."""


class Choice(NamedTuple):
    """A choice whose tokens have entries."""

    is_cut: bool
    """False: the whole vocabulary stays in play. Tokens that vLLM masks in such a row have a probability of 0."""
    numbers: dict[bytes, int]
    """The number of each set in the choice's entries so far, by the set's bytes or their hash."""


HEAD, FORM = struct.Struct("=ii"), struct.Struct("=i")
SHORT_BYTES = 256
"""A set up to this size is its own key in `Choice.numbers`; a larger set is hashed."""


def make_entries(figures: SampledRows, choices_R: Sequence[Choice]) -> tuple[np.ndarray, list[int]]:
    """The words of R rows' entries, one after the other, and the number of words of each entry, 0 for an empty set. A new set
    gets the next number in its row's choice."""
    kept, logprobs_R = figures.kept, figures.logprobs_R.view(np.int32)
    if kept is None:
        heads = np.full((len(choices_R), 2), -1, dtype=np.int32)
        heads[:, 1] = logprobs_R
        return heads.ravel(), [2] * len(choices_R)
    ids, words, lengths = kept.ids.tobytes(), list[bytes](), list[int]()
    for row, (choice, bits, count, end, is_whole, is_listed) in enumerate(
        zip(
            choices_R,
            logprobs_R.tolist(),
            kept.counts_R.tolist(),
            kept.ends.tolist(),
            kept.is_whole_R.tolist(),
            kept.is_listed_R.tolist(),
            strict=True,
        )
    ):
        number, content, form = -1, b"", LIST if is_listed else MASK
        if not is_whole and count and choice.is_cut:
            content = ids[4 * (end - count) : 4 * end] if is_listed else kept.masks_R[row].tobytes()
            key = content
            if len(content) > SHORT_BYTES:
                key = hashlib.blake2b(content, digest_size=16).digest()
            new = len(choice.numbers)
            number = choice.numbers.setdefault(key, new)
            content = FORM.pack(form[0]) + content if number == new else b""
        words.append(HEAD.pack(number, bits) + content if count else b"")
        lengths.append(len(words[-1]) // 4)
    return np.frombuffer(b"".join(words), dtype=np.int32), lengths
