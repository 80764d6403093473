"""A tree is its sequences: the same loss and the same gradient, for every member of the family and three architectures."""

from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from art_server.trainer.policy import Policy
from tests.architectures import CONFIGS
from tests.forests import assert_tree_equals_rows

EXAMPLES = {
    "deadline": None,
    # Shrinking would take minutes, and a seed shrinks to nothing telling.
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


FORESTS = {
    "seed": st.integers(0, 100_000),
    "budget": st.integers(3, 600),
    "noise": st.sampled_from([1e-4, 0.05, 0.5]),
    "is_plain": st.booleans(),
}


@settings(max_examples=6, **EXAMPLES)
@given(name=st.sampled_from(sorted(CONFIGS)), **FORESTS)
def test_tree_equals_rows(
    started: tuple[Policy, Path],
    tmp_path: Path,
    name: str,
    seed: int,
    budget: int,
    noise: float,
    is_plain: bool,
) -> None:
    assert_tree_equals_rows(started, tmp_path, CONFIGS[name], seed, budget, noise, is_plain)
