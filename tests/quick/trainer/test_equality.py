"""A tree is its sequences: the same loss and the same gradient, for some members of the family and three architectures.

`tests/long/trainer/test_equality.py` has every member."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from art_server.trainer.policy import Policy
from tests.makers.architectures import CONFIGS
from tests.makers.forests import EXAMPLES, FORESTS, assert_tree_equals_rows


@settings(max_examples=3, **EXAMPLES)
@given(name=st.sampled_from(sorted(CONFIGS)), **FORESTS)
def test_tree_equals_rows(
    started: tuple[Policy, Path], tmp_path: Path, name: str, seed: int, budget: int, noise: float, is_plain: bool
) -> None:
    assert_tree_equals_rows(started, tmp_path, CONFIGS[name], seed, budget, noise, is_plain)
