from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_protocol.wire import LoRAConfig
from art_server.store.model_folder import ModelFolder, ModelRecord
from art_server.terminal.plot import draw, points, print_plot
from tests.demo import HOSTILE_METRIC, log
from tests.quick.terminal.conftest import Ran, screen, shown

Run = Callable[..., Ran]


def history(*values: float | None, first: int = 1) -> dict[str, Any]:
    return {
        "steps": list(range(first, first + len(values))),
        "metrics": {"train/reward": list(values)},
    }


def test_a_curve_is_drawn_from_corner_to_corner() -> None:
    box = (0.0, 1.0, 0.0, 1.0)
    assert draw([(0, 0), (1, 1)], box, 4, 2) == ["⠀⠀⡠⠊", "⡠⠊"]
    assert draw([(0, 1), (1, 0)], box, 4, 2) == ["⠑⢄", "⠀⠀⠑⢄"]
    assert draw([(0, 0), (0.5, 0), (1, 0)], box, 4, 2) == ["", "⣀⣀⣀⣀"]


def test_one_point_and_equal_values_can_be_drawn() -> None:
    assert draw([(3, 0.5)], (3, 3, 0.5, 0.5), 4, 2) == ["⠁", ""]
    assert draw([(1, 2.0), (2, 2.0)], (1, 2, 2.0, 2.0), 2, 1) == ["⠉⠉"]


def test_missing_and_infinite_values_are_left_out() -> None:
    row = {"steps": [1, None, 3, 4], "metrics": {"m": [0.5, 1.0, None, float("inf")]}}
    assert points(row, "m") == [(1.0, 0.5)] and points(row, "other") == []


def test_charts_of_a_metric_share_their_axes() -> None:
    console = screen(40)
    models = {"p/a": history(0.0, 1.0), "p/b": history(0.5, 0.25, None, first=2), "p/c": history()}
    print_plot(console, models, ["train/reward"])
    lines = shown(console).splitlines()
    assert len(lines) == 2 * 11, "an empty line, the title, eight rows and the axis"
    assert (lines[1], lines[12]) == ("p/a train/reward", "p/b train/reward")
    assert lines[10].strip() == "step  1 to 3, last 1.000, highest 1.000 at step 2"
    for first in (2, 13):
        assert lines[first].startswith("   1.000") and lines[first + 7].startswith("   0.000")
        assert max(map(len, lines[first : first + 8])) <= 40


def test_pictures_and_pages_are_written(run: Run, folder: Path, tmp_path: Path) -> None:
    for name, beginning in (
        ("a.png", b"\x89PNG"),
        ("a.svg", b"<?xml"),
        ("a.HTML", b"<!doctype html>"),
    ):
        out = tmp_path / name
        ran = run("plot", "webnav-8b", "webnav-lr2e5", "--out", out, "--path", folder)
        assert (ran.code, ran.out) == (0, "") and f"{name} is written" in ran.err
        assert out.read_bytes().startswith(beginning)
    page = (tmp_path / "a.HTML").read_text()
    assert "demo\\u002fwebnav-8b" in page or "demo/webnav-8b" in page


def test_names_are_no_formulas_and_no_markup(run: Run, tmp_path: Path) -> None:
    record = ModelRecord(name="a", project="p", base_model="b", lora=LoRAConfig())
    model = ModelFolder(tmp_path, "p", "a")
    model.create(record, tmp_path / "engine.log")
    name = "train/$\\frac{</script><script>alert(1)"
    log(model, 1, {name: 1.0, HOSTILE_METRIC: 1.0})
    for suffix in ("svg", "html", "png"):
        out = tmp_path / f"x.{suffix}"
        assert run("plot", "a", "--metric", name, "--out", out, "--path", tmp_path).code == 0
        assert b"<script>alert(1)" not in out.read_bytes()


def test_a_file_that_cannot_be_written_is_an_error(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "none" / "x.svg"
    code, _, err = run("plot", "webnav-8b", "--out", out, "--path", folder)
    assert code == 2 and str(out) in err
