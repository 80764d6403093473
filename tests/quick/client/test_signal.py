import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_protocol.signal import group_has_signal, has_signal


@pytest.mark.parametrize(
    ("values", "is_expected"),
    [
        ([], False),
        ([3.0], False),
        ([0.1 + 0.2, 0.3], False),
        ([0.7, 0.7000000476837158], False),
        ([0.0, -0.0], False),
        ([0.0, 5e-7], False),
        ([0.0, 2e-6], True),
        ([1e9, 1e9 + 500], False),
        ([1e9, 1e9 + 2000], True),
        ([-1e9, -1e9 - 500], False),
        ([-1e308, 1e308], True),
        ([0.0, 1.0], True),
    ],
)
def test_values_differ_by_more_than_a_millionth(values: list[float], is_expected: bool) -> None:
    assert has_signal(values) is is_expected


@given(st.lists(st.floats(-1e6, 1e6), max_size=6), st.floats(1.0, 1e6))
def test_order_sign_and_repetition_change_nothing(values: list[float], other: float) -> None:
    is_expected = has_signal(values)
    assert has_signal(values[::-1]) == has_signal([-value for value in values]) == is_expected
    assert has_signal([*values, *values]) == is_expected
    assert has_signal([*values, 3 * other, -other])


def test_a_group_has_signal_in_rewards_turns_or_advantages() -> None:
    noise = [0.7, 0.7000000476837158]
    assert not group_has_signal(noise, [[0.5, None], None, [0.5 + 1e-9]], [[0.0, [0.0, 0.0]], None])
    assert group_has_signal([0.0, 1.0], [], [])
    assert group_has_signal(noise, [[0.5], None, [1.0]], [])
    assert group_has_signal(noise, [], [None, [None, [0.0, -1e-9]]])
    assert not group_has_signal([math.nan, 1.0, "0.5", None, 10**400], [], [])
