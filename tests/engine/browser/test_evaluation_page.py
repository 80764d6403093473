"""The page of differences between two evaluations, `eval.html` of `art eval`."""

from pathlib import Path
from typing import Any

import pytest

from art.finetune.differences import compare, write_page
from art.finetune.results import ResultRecord


def records(step: int, rewards: list[float | None]) -> list[ResultRecord]:
    return [
        ResultRecord(
            model=f"demo/agent@{step}",
            id=f"row {number}",
            question=f"a long question {'x' * 200}",
            answer="Rome",
            output="<img src=x onerror=alert(1)>",
            reward=reward,
            reasons={"judge": "a reason"},
            error="it failed" if reward is None else None,
        )
        for number, reward in enumerate(rewards)
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    before, after = records(0, [1.0, 0.0, 1.0, None]), records(1, [0.0, 1.0, 1.0, 1.0])
    write_page(tmp_path / "eval.html", compare(before, after), before, after)
    return tmp_path / "eval.html"


@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_rows_that_differ_are_shown_and_fit_the_page(page: Any, file: Path, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(file.as_uri())
    assert page.locator("h1").inner_text() == "demo/agent@1 compared with demo/agent@0"
    assert page.locator("details[open] summary").all_inner_texts() == ["1 worse", "1 better"]
    assert page.locator(".worse").inner_text() == "reward 0" and page.locator(".better").inner_text() == "reward 1"
    assert page.get_by_text("<img src=x onerror=alert(1)>").first.is_visible() and page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.get_by_text("1 in one only").click()
    assert page.get_by_text("it failed").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_its_colours_can_be_read(page: Any, file: Path, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.emulate_media(color_scheme=theme)
    page.goto(file.as_uri())
    violations = axe.Axe().run(page).response["violations"]
    assert [violation["id"] for violation in violations] == []
