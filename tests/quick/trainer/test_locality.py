"""A sequence's log-probabilities and gradients are its own: those of the sequence alone, whatever else a micro-batch holds.

For each family's attention, positions and routing, at toy size: trees, and padded rows.
"""

from pathlib import Path

from tests.locality import assert_own


def test_neighbours_change_no_sequence_of_a_model_with_longrope(tmp_path: Path) -> None:
    assert_own("phi3 longrope", tmp_path)
