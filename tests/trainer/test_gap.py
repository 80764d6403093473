import pytest

from art_server.jobs.gap_bars import EXACT, LARGEST_MEASURED, gap_bars
from art_server.settings import ServerConfig


def test_bars_are_four_times_what_was_measured_unless_a_limit_is_given() -> None:
    measured = LARGEST_MEASURED["bfloat16"]
    bars = gap_bars(("bfloat16", "float32"))
    assert bars is not None
    assert (bars.high, bars.wrong) == (measured, 4 * measured)
    given = gap_bars(("bfloat16", "float32"), limit=0.4)
    assert given is not None and (given.high, given.wrong) == (0.1, 0.4)
    assert gap_bars(("bfloat16", "float32"), limit=0.0) is None
    assert gap_bars(("float32", "float32"), is_exact=True) == EXACT


@pytest.mark.parametrize("engine", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("trainer", ["float32", "bfloat16", "float16"])
def test_each_pair_of_number_types_has_a_bar(engine: str, trainer: str) -> None:
    assert gap_bars((engine, trainer)) is not None


def test_number_types_follow_the_device_unless_they_are_given() -> None:
    assert ServerConfig().number_types("cpu") == ("float32", "float32")
    assert ServerConfig().number_types("cuda") == ("bfloat16", "bfloat16")
    assert ServerConfig(exact=True).number_types("cuda") == ("float32", "float32")
    assert ServerConfig(dtype="bfloat16").number_types("cpu") == ("bfloat16", "float32")
    with pytest.raises(ValueError, match="--exact computes in float32"):
        ServerConfig(exact=True, dtype="bfloat16")
