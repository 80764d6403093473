from typing import Any

import pytest

from art_watch.terminal.plot import HEIGHT, Curve, draw, print_plot, read_curve
from tests.quick.watch.terminal.conftest import ESCAPES, SHOWN_ESCAPES, screen, shown


def history(*values: float | None, first: int = 1) -> dict[str, Any]:
    return {"steps": list(range(first, first + len(values))), "metrics": {"train/reward": list(values)}}


def test_a_curve_is_drawn_from_corner_to_corner_with_whole_steps() -> None:
    rising = Curve([1.0, 4.0], [0.0, 1.0])
    title, top, *rows, bottom, ticks = draw("p/a m", rising, rising, 40).splitlines()
    assert title.strip() == "p/a m" and top.strip().startswith("┌") and bottom.strip()[0] == "└"
    assert rows[0].startswith("1.0") and rows[-1].startswith("0.0")
    left, right = rows[0].index("┤") + 1, rows[0].rindex("│") - 1
    assert rows[0][right] != " " and rows[0][left] == " "
    assert rows[-1][left] != " " and rows[-1][right] == " "
    assert ticks.split() == ["1", "2", "3", "4"]


@pytest.mark.parametrize("curve", [Curve([3.0], [0.5]), Curve([1.0, 2.0], [2.0, 2.0])])
def test_one_point_and_equal_values_can_be_drawn(curve: Curve, capfd: pytest.CaptureFixture[str]) -> None:
    assert len(draw("m", curve, curve, 40).splitlines()) == HEIGHT
    assert capfd.readouterr() == ("", ""), "the library has no complaint"


def test_what_a_terminal_would_obey_is_shown_in_the_title() -> None:
    point = Curve([1.0], [1.0])
    title = draw(f"a\n{ESCAPES}", point, point, 100).splitlines()[0]
    assert title.strip() == f"a⏎{SHOWN_ESCAPES}"


def test_missing_and_infinite_values_are_left_out() -> None:
    row = {"steps": [1, None, 3, 4], "metrics": {"m": [0.5, 1.0, None, float("inf")]}}
    assert read_curve(row, "m") == ([1.0], [0.5]) and read_curve(row, "other") == ([], [])


def test_charts_of_a_metric_share_their_axes() -> None:
    console = screen(40)
    models = {"p/a": history(0.0, 1.0), "p/b": history(0.5, 0.25, None, first=2), "p/c": history()}
    print_plot(console, models, ["train/reward"])
    charts = shown(console).strip("\n").split("\n\n")
    lines = [chart.splitlines() for chart in charts]
    assert [chart_lines[0].strip() for chart_lines in lines] == ["p/a train/reward", "p/b train/reward"]
    assert [chart_lines[-2].split() for chart_lines in lines] == [["1", "2", "3"]] * 2
    assert [chart_lines[-1] for chart_lines in lines] == [
        "last 1.000, highest 1.000 at step 2",
        "last 0.250, highest 0.500 at step 2",
    ]
    models["p/a"]["metrics"]["sampled_step"] = [0.0, 1.0]
    wide = screen(80)
    print_plot(wide, models, ["train/reward"])
    assert "highest 1.000 at step 2 (earned by step 1)\n" in shown(wide)
    labels = [[line[:3] for line in chart_lines[1:-3]] for chart_lines in lines]
    assert labels[0] == labels[1] and max(map(len, shown(console).splitlines())) <= 40
