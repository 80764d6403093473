"""A tree is its sequences: the same loss and the same gradient, for every member of the family and three architectures."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings

from art_server.trainer.policy import Policy
from tests.makers.architectures import ARCHITECTURES, CONFIGS
from tests.makers.forests import EXAMPLES, FORESTS, assert_tree_equals_rows


def losses_of(architecture: str) -> list[str]:
    """The loss does not depend on the model: one architecture has all of them, the others the three kinds of ratios."""
    return sorted(CONFIGS) if architecture == "llama" else ["geometric", "grpo", "gspo"]


@pytest.mark.parametrize(
    ("started", "name"),
    [(architecture, name) for architecture in ARCHITECTURES for name in losses_of(architecture)],
    indirect=["started"],
)
@settings(max_examples=4, **EXAMPLES)
@given(**FORESTS)
@example(  # with GSPO, queries and keys without a gradient
    seed=206, budget=113, noise=0.05, is_plain=True
)
@example(  # every trajectory with signal is cut short
    seed=4088, budget=128, noise=0.5, is_plain=True
)
def test_tree_equals_rows_for_each_loss(
    started: tuple[Policy, Path], tmp_path: Path, name: str, seed: int, budget: int, noise: float, is_plain: bool
) -> None:
    assert_tree_equals_rows(started, tmp_path, CONFIGS[name], seed, budget, noise, is_plain)
