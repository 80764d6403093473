"""The page over a live server with vLLM, in Chromium: its numbers are those of the files, a step appears by itself, and
tokens have the numbers that were recorded."""

from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.engine.browser.charts import captions
from tests.engine.browser.conftest import browser, page
from tests.live import PROJECT, Server, register, train_one_step
from tests.makers.demo import rows_by_step

__all__ = ["browser", "page"]  # fixtures

NAME = "paged"
REWARD = f"[data-run='{PROJECT}/{NAME}'] td:nth-child(3) .number"


def rows_of(server: Server) -> dict[int, dict[str, Any]]:
    return rows_by_step(server.model_dir(NAME) / "history.jsonl")


@pytest.fixture(scope="module")
def trained(server: Server) -> Server:
    register(server, NAME)
    for _ in range(2):
        train_one_step(server, NAME)
    return server


def test_the_numbers_of_a_live_run_are_those_of_its_history(page: Any, trained: Server) -> None:
    page.goto(f"{trained.url}/#/run/{PROJECT}/{NAME}")
    page.wait_for_selector(".js-plotly-plot")
    page.get_by_label("Numbers of").focus()
    for step in (2, 1):
        row, numbers = rows_of(trained)[step], captions(page)
        assert numbers["Reward"]["train"] == row["train/reward"]
        assert numbers["Entropy"]["nats"] == row["loss/entropy"]
        assert numbers["Gap of log-probabilities"]["mean"] == row["loss/logprob_gap_mean"]
        seconds = numbers["Seconds of a step"]
        assert seconds["train"] == row["time/job_train_s"]
        assert seconds["load"] == row["time/job_load_s"]
        page.keyboard.press("ArrowLeft")
        page.wait_for_function("() => document.querySelector('#at')?.textContent.startsWith('step 1')")


def test_a_new_step_appears_by_itself(page: Any, trained: Server) -> None:
    page.goto(trained.url)
    page.wait_for_selector("text=Connected")
    page.wait_for_selector(REWARD)
    row = "[data-run='tests/paged'] td:nth-child(2) .number"
    before = int(page.inner_text(row))
    ended = train_one_step(trained, NAME)
    assert ended["step"] == before + 1
    reward = rows_of(trained)[before + 1]["train/reward"]
    for selector, field, value in ((row, "textContent", str(before + 1)), (REWARD, "title", reward)):
        page.wait_for_function(
            "([selector, field, value]) => document.querySelector(selector)?.[field] == value",
            arg=[selector, field, value],
        )


def test_tokens_have_the_recorded_numbers(page: Any, trained: Server) -> None:
    newest = max(rows_of(trained))
    train_one_step(trained, NAME)
    record = load_file(trained.model_dir(NAME) / "tokens" / f"{newest + 1:04d}.safetensors")
    address = f"#/run/{PROJECT}/{NAME}/rollout/train/{newest + 1}/0/0?colour=logprob&figures=1"
    page.goto(f"{trained.url}/{address}")
    page.wait_for_selector(".token[data-figure]")
    seen = page.locator(".turn.role-assistant .tokens .token").evaluate_all(
        "all => all.map(e => [Number(e.style.getPropertyValue('--level')), Number(e.dataset.place)])"
    )
    assert seen
    logprobs = record["sampled_logprobs_T"]  # the first rollout's are the first
    for level, position in seen:
        assert level == pytest.approx(min(1, -float(logprobs[position]) / 5), abs=2e-3)
