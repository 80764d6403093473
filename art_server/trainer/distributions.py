"""Scores tokens under the distributions that they were sampled from: biased logits, divided by a temperature, within a
kept set. Predictions go through the output head in pieces. If the kept sets of a piece are small, only their columns of
the head are computed.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from art_server.shared.kept_set import unpack_set
from art_server.shared.trainer_messages import Distribution
from art_server.trainer.head import Piece, Project, ProjectColumns

RAW = -1
"""The model's own distribution at temperature 1."""

ROWS_OF_A_PIECE = 256
"""The largest number of predictions whose kept sets are joined. In a larger piece each prediction would compute more columns
that only other predictions need."""

LEFT_OUT = -1e30
"""The logit of a token outside the kept set. Its probability is exactly 0, and 0 * logit is 0; with -inf it is NaN."""


@dataclass(frozen=True, slots=True)
class BehaviourDistribution:
    """A decoded `Distribution`."""

    temperature: float
    bias: dict[int, float]
    kept_ids: np.ndarray | None
    """int64, ascending; None is the whole vocabulary."""


def decode_distributions(distributions: Sequence[Distribution]) -> list[BehaviourDistribution]:
    """The distributions with their kept sets unpacked.

    Raises:
        ValueError: a kept set cannot be read.
    """
    return [
        BehaviourDistribution(
            distribution.temperature,
            distribution.logit_bias,
            None if distribution.kept is None else unpack_set(base64.b64decode(distribution.kept)),
        )
        for distribution in distributions
    ]


def cut_pieces(
    distributions: np.ndarray,
    targets_N: torch.Tensor,
    table: Sequence[BehaviourDistribution],
    project: Project,
    project_columns: ProjectColumns,
    num_vocabulary: int,
    max_logits: int,
    more_NK: torch.Tensor | None = None,
) -> list[Piece]:
    """Pieces of N predictions, which are in ascending order of their distribution, RAW first. Only predictions of RAW get the
    log-probabilities of further tokens: a teacher's are of the whole distribution at temperature 1.

    Raises:
        ValueError: a target is outside its kept set.
    """
    pieces: list[Piece] = []
    num_raw = int(np.searchsorted(distributions, 0))  # RAW is -1
    whole = max(1, max_logits // num_vocabulary)
    for start in range(0, num_raw, whole):
        here = slice(start, min(num_raw, start + whole))
        more = None if more_NK is None else more_NK[here]
        pieces.append(Piece(here, targets_N[here], project, num_vocabulary, more))
    start = num_raw
    while start < len(distributions):
        stop = min(len(distributions), start + ROWS_OF_A_PIECE)
        columns = _columns(distributions[start:stop], table, num_vocabulary)
        num_columns = num_vocabulary if columns is None else len(columns)
        stop = min(stop, start + max(1, max_logits // num_columns))
        here = slice(start, stop)
        pieces.append(
            _piece(
                here,
                distributions[here],
                targets_N[here],
                table,
                columns,
                num_vocabulary,
                project,
                project_columns,
            )
        )
        start = stop
    return pieces


def _columns(
    distributions: np.ndarray, table: Sequence[BehaviourDistribution], num_vocabulary: int
) -> np.ndarray | None:
    """The joined kept sets; None where computing the whole vocabulary costs no more."""
    is_kept_V = np.zeros(num_vocabulary, dtype=bool)
    for index in np.unique(distributions):
        kept_ids = table[index].kept_ids
        if kept_ids is None:
            return None
        is_kept_V[kept_ids] = True
    columns = np.flatnonzero(is_kept_V)
    # Chosen columns are copied out of the head before they are multiplied.
    return columns if 2 * len(columns) <= num_vocabulary else None


def _left_out_and_biases(
    sampled_from: Sequence[BehaviourDistribution], column_of_V: np.ndarray, num_columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each distribution the columns outside its kept set, and its logit bias by column."""
    is_left_out = np.zeros((len(sampled_from), num_columns), dtype=bool)
    biases = np.zeros((len(sampled_from), num_columns), dtype=np.float32)
    for row, distribution in enumerate(sampled_from):
        if distribution.kept_ids is not None:
            is_left_out[row] = True
            is_left_out[row, column_of_V[distribution.kept_ids]] = False
        for token_id, bias in distribution.bias.items():
            # A biased token may be outside all kept sets of the piece.
            if column_of_V[token_id] >= 0:
                biases[row, column_of_V[token_id]] = bias
    return is_left_out, biases


def _piece(
    here: slice,
    distributions: np.ndarray,
    targets: torch.Tensor,
    table: Sequence[BehaviourDistribution],
    columns: np.ndarray | None,
    num_vocabulary: int,
    project: Project,
    project_columns: ProjectColumns,
) -> Piece:
    device = targets.device
    present, rows = np.unique(distributions, return_inverse=True)
    if columns is None:
        column_of_V, num_columns = np.arange(num_vocabulary), num_vocabulary
    else:
        column_of_V, num_columns = np.full(num_vocabulary, -1), len(columns)
        column_of_V[columns] = np.arange(num_columns)
    is_left_out, biases = _left_out_and_biases([table[index] for index in present], column_of_V, num_columns)
    targets_in_columns = column_of_V[targets.cpu().numpy()]
    # A target without a column is -1, which reads the last column; the first condition decides there.
    is_outside = (targets_in_columns < 0) | is_left_out[rows, targets_in_columns]
    if is_outside.any():
        token_id = int(targets[int(is_outside.argmax())])
        raise ValueError(f"token {token_id} is outside the kept set that it was sampled from")
    temperatures = torch.tensor([table[index].temperature for index in present], device=device)
    temperatures_N1 = temperatures[rows][:, None] if bool((temperatures != 1).any()) else None
    rows_N = torch.from_numpy(rows).to(device)
    masks = torch.from_numpy(is_left_out).to(device) if is_left_out.any() else None
    added = torch.from_numpy(biases).to(device) if biases.any() else None
    columns_C = None if columns is None else torch.from_numpy(columns).to(device)

    def score(hidden_ND: torch.Tensor) -> torch.Tensor:
        logits = project(hidden_ND) if columns_C is None else project_columns(hidden_ND, columns_C)
        logits = logits.float()
        # In vLLM's order (0.32, v1/sample/sampler.py): the bias, the temperature, then what cuts the vocabulary.
        if added is not None:
            logits = logits + added[rows_N]
        if temperatures_N1 is not None:
            logits = logits / temperatures_N1
        if masks is not None:
            # Outside the autograd graph: these tokens have probability 0 and so no gradient.
            with torch.no_grad():
                logits.masked_fill_(masks[rows_N], LEFT_OUT)
        return logits

    return Piece(here, torch.from_numpy(targets_in_columns).to(device), score, num_columns)
