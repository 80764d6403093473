"""A sequence's log-probabilities and gradients are its own: those of the sequence alone, whatever else a micro-batch holds.

For each family's attention, positions and routing, at toy size: trees, and padded rows.
"""

from pathlib import Path

import pytest

from tests.locality import assert_own
from tests.makers.toy_models import FAMILIES, ROPES


@pytest.mark.parametrize("name", [*FAMILIES, *ROPES])
def test_neighbours_change_no_sequence(name: str, tmp_path: Path) -> None:
    assert_own(name, tmp_path)
