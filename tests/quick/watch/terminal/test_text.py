import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from art_watch.terminal.text import age, number, size, small_bars, visible
from tests.quick.watch.terminal.conftest import ESCAPES, SHOWN_ESCAPES


@given(st.text(st.characters(codec=None)))
def test_no_text_gives_a_terminal_a_command(text: str) -> None:
    shown = visible(text)
    shown.encode()
    for character in shown:
        assert unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp") or character in "\n\t"
        assert unicodedata.bidirectional(character) not in ("RLO", "LRO", "RLE", "LRE", "RLI", "LRI")


def test_control_characters_become_pictures_or_escapes() -> None:
    assert visible(ESCAPES) == SHOWN_ESCAPES
    assert visible("a\r\nb\tc\x7f") == "a␍\nb\tc␡"
    assert visible("\ud800 \u200b") == "\\ud800 \\u200b"


def test_letters_of_all_scripts_and_joined_pictures_stay() -> None:
    for text in ("naïve 日本語 עברית العربية", "👩‍👩‍👧", "می‌خواهم", "a\u00a0b"):
        assert visible(text) == text


def test_numbers_fit_their_column() -> None:
    shown = [number(value) for value in (None, 0.0, 0.5, -2.0, 123456.0, 4.9e-4, -5.99e-6, float("nan"))]
    assert shown == ["-", "0.000", "0.500", "-2.000", "1.23e+05", "0.00049", "-5.99e-06", "nan"]
    assert [age(seconds) for seconds in (None, -3.0, 59.0, 3600.0, 200_000.0)] == ["-", "0 s", "59 s", "1 h", "2 d"]
    assert [size(number) for number in (3 * 2**29, 2**26, 45_000, 0)] == ["1.5 GiB", "64.0 MiB", "43.9 KiB", "0.0 KiB"]


def test_bars_span_lowest_to_highest_and_skip_what_is_missing() -> None:
    assert small_bars([0.0, None, 0.5, 1.0, float("nan")]) == "▁ ▅█ "
    assert small_bars([3.0, 3.0]) == "▁▁"
    assert small_bars([]) == "" and small_bars([None]) == " "
