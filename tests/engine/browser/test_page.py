"""What the page shows, in Chromium: numbers as in the files, changes as they happen, addresses, keys, jobs."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from art_protocol.wire import About, ErrorDetail, JobReport, Unused
from art_server.api.keys import Keys
from art_server.settings import ApiKey
from art_server.store.model_folder import ModelFolder
from art_watch import rollouts, scores
from art_watch.runs import Runs
from art_watch.view import make_view
from tests.engine.browser.charts import captions
from tests.engine.browser.conftest import NUM_STEPS
from tests.fakes.page_server import make_live
from tests.makers.demo import HOSTILE_METRIC, log, rows_by_step, write_jobs
from tests.makers.demo_scores import make_scores
from tests.quick.models.house import House

RUN = "#/run/demo/webnav-8b"
ROLLOUT = f"{RUN}/rollout/train/1/0/1"


def folder_of(root: Path, name: str = "webnav-8b") -> ModelFolder:
    return ModelFolder(root, "demo", name)


def rows_of(root: Path, name: str = "webnav-8b") -> dict[int, dict[str, Any]]:
    return rows_by_step(folder_of(root, name).history_file)


def shown(page: Any, row: dict[str, Any]) -> None:
    """Waits until the charts show the numbers of a row, and checks them."""
    page.wait_for_function(
        "step => document.querySelector('#at')?.textContent.startsWith(`step ${step} `) || "
        "document.querySelector('#at')?.textContent.startsWith(`step ${step},`)",
        arg=row["step"],
    )
    numbers = captions(page)
    assert numbers["Reward"] == {"train": row["train/reward"], "validation": row.get("val/reward")}
    assert numbers["Gap of log-probabilities"]["mean"] == row["loss/logprob_gap_mean"]
    assert numbers["Entropy"]["nats"] == row["loss/entropy"]
    assert numbers["Dead groups"] == {
        "dead": row["data/step_num_groups_dead"],
        "submitted": row["data/step_num_groups_submitted"],
    }
    assert numbers["Seconds of a step"] == {
        phase: row[f"time/job_{phase}_s"] for phase in ("pause", "train", "save", "load", "finish")
    }
    assert numbers[HOSTILE_METRIC]["value"] == row[HOSTILE_METRIC]


def test_charts_show_the_numbers_of_the_history_at_any_step(page: Any, serve: Any, root: Path) -> None:
    also = json.dumps([HOSTILE_METRIC])
    rows = rows_of(root)
    page.goto(serve(make_view(root)).url)
    page.evaluate("also => { location.hash = `#/run/demo/webnav-8b?also=${encodeURIComponent(also)}`; }", also)
    page.wait_for_selector(".js-plotly-plot")
    page.get_by_label("Numbers of").focus()
    newest = captions(page)
    assert newest["Reward"]["train"] == rows[NUM_STEPS]["train/reward"]
    assert newest["Reward"]["validation"] == rows[10]["val/reward"], "its newest value"
    for step in (NUM_STEPS - 1, NUM_STEPS - 2):
        page.keyboard.press("ArrowLeft")
        shown(page, rows[step])
    page.keyboard.press("Home")
    shown(page, rows[1])


def test_a_run_says_what_it_is_and_what_its_jobs_noted(page: Any, serve: Any, root: Path) -> None:
    page.goto(serve(make_view(root)).url + RUN)
    about = page.get_by_label("About this run")
    about.wait_for()
    text = about.inner_text()
    tokens = sum(row["data/step_trainable_assistant_tokens"] for row in rows_of(root).values())
    assert "Qwen/Qwen3-8B rank 16" in text and f"{tokens:,.0f}" in text
    assert "Learning rate\n2e-5" in text and "all rewards in the group are equal" in text
    assert "max_grad_norm" not in text, "a default"
    about.locator("summary").click()
    assert "max_grad_norm" in about.inner_text()
    log(folder_of(root), NUM_STEPS + 1, {"data/step_trainable_assistant_tokens": 1_000_000.0})
    page.wait_for_selector(f"[aria-label='About this run'] >> text={tokens + 1_000_000:,.0f}")
    assert "max_grad_norm" in about.inner_text(), "it stays open"
    log(folder_of(root), NUM_STEPS + 2, {"data/step_trainable_assistant_tokens": 0.0})
    page.wait_for_selector(f":text('Nothing was trained since step {NUM_STEPS + 1}')")
    assert f"in {NUM_STEPS + 1} of {NUM_STEPS + 2} steps" in about.inner_text()


def test_a_run_says_what_it_has_cost_and_what_trained_nothing(page: Any, serve: Any, root: Path) -> None:
    unused = Unused(reason="cut, `overlong`", num_rollouts=1200, num_tokens=34000)
    report = JobReport(num_trajectories=1200, num_sampled_tokens=40000, unused=[unused], notes=["<b>no</b> `a < b`"])
    write_jobs(root, [(folder_of(root), NUM_STEPS + 1)], job_id="n", report=report.model_dump_json())
    folder_of(root).write_about(About(price_per_hour=4.5))
    page.goto(serve(make_view(root)).url + RUN)
    about = page.get_by_label("About this run")
    about.wait_for()
    text = about.inner_text()
    assert " at 4.5 an hour" in text and "Time in steps\n" in text
    assert (
        f"in {48 * NUM_STEPS + 1200:,} rollouts" in text
        and "of the tokens sampled for training:" in text
        and "Sampled for training" in text
    )
    assert "1,200 rollouts, 34,000 tokens: cut, overlong" in text and "<b>no</b> a < b" in text
    assert about.locator("code").all_inner_texts() == ["overlong", "a < b"]


def test_a_run_without_its_jobs_says_that_its_configuration_is_not_known(page: Any, serve: Any, root: Path) -> None:
    (root / ".server" / "server.sqlite").unlink()
    page.goto(serve(make_view(root)).url + RUN)
    about = page.get_by_label("About this run")
    about.wait_for()
    assert "Learning rate\n2e-5" in about.inner_text() and "not known: its jobs are not on disk" in about.inner_text()


def test_a_run_is_tagged_noted_renamed_and_deleted(page: Any, serve: Any, root: Path) -> None:
    here = House(root)
    url = serve(here.app, lifespan="off").url
    page.goto(f"{url}/{RUN}")
    page.get_by_role("button", name="Tags, notes, price, name").click()
    page.locator("#tags").fill("best, <i>rate</i>")
    page.locator("#notes").fill("first\nsecond")
    page.locator("#price").fill("4.5")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector(".about .badge:text-is('best')")
    about = folder_of(root).read_about()
    assert (about.tags, about.notes, about.price_per_hour) == (["best", "<i>rate</i>"], "first\nsecond", 4.5)
    page.get_by_role("button", name="Tags, notes, price, name").click()
    page.locator("#new-name").fill("sql-repair")
    page.get_by_role("button", name="Rename", exact=True).click()
    page.wait_for_selector("text=model 'demo/sql-repair' exists already")
    page.locator("#new-name").fill("renamed")
    page.get_by_role("button", name="Rename", exact=True).click()
    page.wait_for_selector("h1:has-text('demo/renamed')")
    assert here.registry.get("demo", "renamed").step == NUM_STEPS
    page.get_by_role("link", name="Runs").first.click()
    page.get_by_label("Filter").fill("<i>rate")
    page.wait_for_selector("[data-run='demo/renamed'] .badge:text-is('best')")
    page.get_by_role("link", name="demo/renamed").click()
    page.get_by_role("button", name="Tags, notes, price, name").click()
    page.get_by_role("button", name="Delete this run").click()
    page.get_by_role("button", name="No", exact=True).click()
    page.get_by_role("button", name="Delete this run").click()
    assert here.registry.find("demo", "renamed") is not None
    page.get_by_role("button", name="Yes, delete it").click()
    page.wait_for_selector("h1:text-is('Runs')")
    assert here.registry.find("demo", "renamed") is None
    here.server.close()


AXES = """async () => {
    const { rangeOf, ticks, labelOf, withGaps, segments, smoothed } = await import("/page/axes.js");
    return {
        counts: rangeOf([3, 8], "amount").range,
        zeros: rangeOf([0, 0], "amount").range,
        constant: rangeOf([0.5, 0.5], null).range,
        ratios: rangeOf([1.000002, 1.000002], "ratio").ticks.labels,
        speeds: rangeOf([80000, 81000], "amount").ticks.labels,
        rates: ticks(0, 2e-5, 4).labels,
        steps: ticks(1, 3, 5, true).labels,
        near: rangeOf([0.2, 0.9], null).range,
        far: rangeOf([0.8, 0.9], null).range,
        outlier: rangeOf([1.05, 4e6], "ratio"),
        decades: rangeOf([2e-4, 30], null, true),
        fitted: rangeOf([0.15, 4], "amount", true),
        narrow: rangeOf([0.42, 0.55], "amount", true),
        logRatios: rangeOf([1.02, 1.05], "ratio", true),
        hidden: rangeOf([0, 0.5, 5], "amount", true).isCut,
        nothing: rangeOf([], null).range,
        gaps: withGaps({ x: [1, 2, 3, 4, 5], steps: [1, 2, 3, 4, 5], y: [1, 2, null, 4, 5] }).y,
        sparse: withGaps({ x: [5, 10, 15], steps: [5, 10, 15], y: [1, 2, 3] }).y,
        rows: segments([{ x: [1, 2, 3, 4], y: [1, null, null, 2] }, { x: [1, 2, 3, 4], y: [1, 2, null, 2] }]),
        smooth: smoothed([1, 1, null, 1], 5),
    };
}"""


def test_axes_begin_and_end_where_numbers_can_be_read(page: Any, serve: Any, root: Path) -> None:
    page.goto(serve(make_view(root)).url)
    axes = page.evaluate(AXES)
    assert -1 < axes["counts"][0] < 0 and axes["counts"][1] > 8, "a line at 0 is seen whole"
    assert -0.1 < axes["zeros"][0] < 0 and axes["zeros"][1] > 1
    assert axes["near"][0] < 0 and axes["far"][0] > 0.7
    assert axes["constant"][0] < 0.5 < axes["constant"][1]
    assert {"0.8", "1.0", "1.2"} <= set(axes["ratios"])
    assert axes["speeds"][0] == "0" and "80k" in axes["speeds"]
    assert axes["rates"][0] == "0" and axes["rates"][-1] == "2.0e-5"
    assert axes["steps"] == ["1", "2", "3"]
    assert axes["outlier"]["isLog"] and axes["outlier"]["ticks"]["labels"][-1] == "1M"
    assert axes["decades"]["ticks"]["labels"] == ["0.001", "0.01", "0.1", "1", "10"]
    low, high = (10**end for end in axes["decades"]["range"])
    assert 1e-4 < low < 2e-4 and 30 < high < 60, "as far as the values, and not to the next decade"
    assert axes["fitted"]["ticks"]["labels"] == ["0.2", "0.5", "1", "2"]
    assert axes["narrow"]["ticks"]["labels"] == ["0.45", "0.50", "0.55"]
    low, high = (10**end for end in axes["logRatios"]["range"])
    assert low < 0.8 and high > 1.2
    assert axes["hidden"]
    assert axes["nothing"][0] < axes["nothing"][1]
    assert axes["gaps"] == [1, 2, None, 4, 5] and axes["sparse"] == [1, 2, 3], "missing is a gap"
    assert axes["rows"] == [[0, 1], [3]]
    assert axes["smooth"] == [1, 1, None, 1]


def test_captions_name_the_step_of_a_number_that_is_of_another_one(page: Any, serve: Any, root: Path) -> None:
    rows = rows_of(root)
    url = serve(make_view(root)).url
    page.goto(url + RUN)
    page.wait_for_selector(".js-plotly-plot")
    legend = page.locator(".legend").first
    assert "(step 10)" in legend.inner_text() and captions(page)["Reward"]["validation"] == rows[10]["val/reward"]
    page.locator("#zoom-to").fill("7")
    page.locator("#zoom-to").press("Enter")
    page.wait_for_selector("#at:has-text('step 7 (newest shown)')")
    numbers = captions(page)
    assert numbers["Reward"] == {"train": rows[7]["train/reward"], "validation": rows[5]["val/reward"]}
    page.get_by_label("Numbers of").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#at:has-text('step 6,')")
    assert captions(page)["Reward"] == {"train": rows[6]["train/reward"], "validation": None}, "none of this step"
    folder_of(root, "sql-repair").roll_back(4)
    page.goto(f"{url}#/compare?runs=demo/sql-repair,demo/webnav-8b")
    page.wait_for_selector(".legend :text('(step 4)')")
    assert captions(page)["Reward"]["demo/sql-repair"] == rows_of(root, "sql-repair")[4]["train/reward"]


def test_charts_are_smoothed_zoomed_and_saved(page: Any, serve: Any, root: Path) -> None:
    rows = rows_of(root)
    page.goto(serve(make_view(root)).url + RUN)
    page.wait_for_selector(".js-plotly-plot .plotly")
    page.get_by_label("Smoothing").select_option("5")
    page.wait_for_function("() => document.querySelector('.plot').data.length > 2")
    page.get_by_label("log axis").check()
    page.wait_for_function("() => document.querySelector('.plot').layout.yaxis.type === 'log'")
    page.locator("#zoom-from").fill("3")
    page.locator("#zoom-from").press("Enter")
    page.wait_for_function("() => document.querySelector('.plot').layout.xaxis.range[0] === 3")
    page.reload()
    page.wait_for_function("() => document.querySelector('.plot')?.layout?.xaxis.range[0] === 3")
    assert page.evaluate("document.querySelector('.plot').layout.yaxis.type") == "log", "the address has it"
    page.get_by_role("button", name="Show the whole axis").click()
    page.wait_for_function("() => document.querySelector('.plot').layout.xaxis.range[0] === 1")
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV of Reward").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert saved.value.suggested_filename == "Reward.csv" and lines[0] == '"step","train","validation"'
    assert [line.split(",")[:2] for line in lines[1:]] == [
        [str(s), str(row["train/reward"])] for s, row in rows.items()
    ]
    assert lines[1].endswith(","), "missing is empty and not 0"
    with page.expect_download() as saved:
        page.get_by_role("button", name="PNG of Reward").click()
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")


def test_the_pointer_shows_one_step_in_all_charts(page: Any, serve: Any, root: Path) -> None:
    rows = rows_of(root)
    page.goto(serve(make_view(root)).url + RUN)
    page.wait_for_selector(".chart:nth-child(2) .js-plotly-plot .plotly")
    page.mouse.move(10, 10)
    box = page.locator(".chart .plot").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
    page.wait_for_function("() => document.querySelector('#at')?.textContent.includes('newest') === false")
    text = page.inner_text("#at")
    step = int(re.findall(r"step (\d+)", text)[0])
    assert 4 <= step <= 9
    numbers = captions(page)
    assert numbers["Reward"]["train"] == rows[step]["train/reward"]
    assert numbers["Entropy"]["nats"] == rows[step]["loss/entropy"]
    assert page.locator(".chart:nth-child(2) .spikeline").count() > 0, "a line in the others"


def test_a_new_step_appears_without_reload(page: Any, serve: Any, root: Path) -> None:
    page.goto(serve(make_view(root)).url)
    page.wait_for_selector("text=Connected")
    step = "[data-run='demo/sql-repair'] td:nth-child(3) .number"
    for selector, value in ((step, 0.123456789), (step, 0.5)):
        log(folder_of(root, "sql-repair"), NUM_STEPS + 1, {"train/reward": value})
        page.wait_for_function(
            "([selector, value]) => document.querySelector(selector)?.title === value", arg=[selector, str(value)]
        )
    page.goto(page.url.split("#")[0] + "#/run/demo/sql-repair")
    page.wait_for_selector(".js-plotly-plot")
    log(folder_of(root, "sql-repair"), NUM_STEPS + 2, {"train/reward": 0.75})
    page.wait_for_function("() => document.querySelector('#at')?.textContent.startsWith('step 14 (newest)')")
    assert captions(page)["Reward"]["train"] == 0.75


def test_a_page_that_is_open_before_the_first_step_gets_every_chart(page: Any, serve: Any, root: Path) -> None:
    folder = ModelFolder(root, "demo", "early")
    folder.create(folder_of(root).read().model_copy(update={"name": "early"}), root / "engine.log")
    page.goto(serve(make_view(root)).url + "#/run/demo/early")
    page.wait_for_selector("text=No steps yet.")
    assert page.locator("#add-metric").count() == 0 or page.locator("#add-metric").is_hidden()
    log(folder, 0, {"val/reward": 0.25})
    page.wait_for_selector(".chart:has-text('Reward')")
    page.select_option("#add-metric", "val/reward")
    page.wait_for_function("() => document.querySelectorAll('.chart').length === 2")
    log(folder, 1, {"train/reward": 0.5, "loss/entropy": 1.25, "train/right": 0.75})
    page.wait_for_selector(".chart:has-text('Entropy')")
    log(folder, 1, {"val/right": 1.0})
    page.wait_for_selector(".chart h3:text('right') + .legend :text('validation')")
    page.reload()
    page.wait_for_selector(".chart h3:text('val/reward')")
    titles = page.locator(".chart h3").evaluate_all("all => all.map(title => title.firstChild.textContent)")
    assert titles == ["Reward", "right", "Entropy", "val/reward"], (
        "own metrics follow the reward; the address has added ones"
    )
    numbers = captions(page)
    assert numbers["right"] == {"train": 0.75, "validation": 1.0}
    assert numbers["Reward"] == {"train": 0.5, "validation": 0.25}
    assert numbers["Entropy"]["nats"] == 1.25 and numbers["val/reward"]["value"] == 0.25


def test_the_table_of_runs_filters_sorts_and_compares(page: Any, serve: Any, root: Path) -> None:
    page.goto(serve(make_view(root)).url)
    page.wait_for_selector("tbody tr")
    page.get_by_label("Filter").fill("WEBNAV demo/webnav-8")
    assert page.locator("tbody tr").count() == 1 and page.locator("text=1 of 3 runs").count() == 1
    page.get_by_label("Filter").fill("")
    page.get_by_role("button", name="name").click()
    names = page.locator("tbody th a").all_inner_texts()
    assert names == ["demo/sql-repair", "demo/webnav-8b", "demo/webnav-lr2e5"]
    page.get_by_role("button", name="reward").click()
    page.reload()
    page.wait_for_selector("tbody tr")
    rewards = [
        float(title) for title in page.locator("td:nth-child(3) .number").evaluate_all("all => all.map(e => e.title)")
    ]
    assert rewards == sorted(rewards, reverse=True) and len(rewards) == 3
    shown = page.locator("td:nth-child(3) .number").all_inner_texts()
    assert len({len(text.partition(".")[2]) for text in shown}) == 1, "the same decimals"
    page.get_by_label("Compare demo/sql-repair").check()
    page.get_by_label("Compare demo/webnav-8b").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.wait_for_selector(".js-plotly-plot")
    expected = {
        name: rows_of(root, name.split("/")[1])[NUM_STEPS]["train/reward"]
        for name in ("demo/sql-repair", "demo/webnav-8b")
    }
    assert captions(page)["Reward"] == expected
    page.get_by_label("By").select_option("tokens")
    page.get_by_label("Also").select_option(HOSTILE_METRIC)
    page.wait_for_function("() => document.querySelectorAll('.chart').length === 3")
    page.reload()
    page.wait_for_selector(".chart:nth-child(3)")
    page.wait_for_function("() => document.querySelector('.plot')?.data?.length > 1")
    tokens = "data/step_trainable_assistant_tokens"
    rows = rows_of(root)
    xs = page.evaluate("document.querySelector('.plot').data[1].x")
    assert xs == [sum(rows[s][tokens] for s in range(1, step + 1)) for step in rows]


def test_rollouts_are_sorted_and_filtered(page: Any, serve: Any, root: Path) -> None:
    page.goto(f"{serve(make_view(root)).url}{RUN}/rollouts/train/1")
    page.wait_for_selector(".cards")
    groups = rollouts.groups(folder_of(root), "train", 1)
    for index, group in enumerate(groups):
        cards = page.locator("section.rollouts").nth(index).locator("a.card .number")
        seen = [float(text) for text in cards.evaluate_all("all => all.map(e => e.title)")]
        assert seen == sorted((rollout["reward"] for rollout in group["rollouts"]), reverse=True)
    for group in page.locator("section.rollouts").all():
        texts = group.locator(".earned .number").all_inner_texts()
        assert len({len(text.partition(".")[2]) for text in texts}) == 1, "the same decimals"
    assert re.search(r"num_tool_calls 1, is_correct [01]", page.locator("a.card").first.inner_text())
    assert "Book the earliest train from Turin" in page.locator("section.rollouts h2").nth(1).inner_text()
    assert page.locator(".card.failure").count() == 1
    assert page.locator(".badge", has_text="dead").count() == 1
    assert "groups with signal" in page.locator("#show option").all_inner_texts()
    page.get_by_label("Reward from").fill("0.3")
    wanted = sum(rollout["reward"] >= 0.3 for group in groups for rollout in group["rollouts"])
    page.wait_for_function("n => document.querySelectorAll('a.card').length === n", arg=wanted)
    page.reload()
    page.wait_for_function("n => document.querySelectorAll('a.card').length === n", arg=wanted)
    page.get_by_label("Reward from").fill("")
    page.get_by_label("Show").select_option("failures")
    page.wait_for_function("() => document.querySelectorAll('section.rollouts').length === 1")
    page.get_by_label("Show").select_option("")
    page.get_by_label("Text").fill("washit")
    page.get_by_role("button", name="Search").click()
    page.wait_for_selector("h2:has-text('Group 4')")
    page.wait_for_function("() => document.querySelectorAll('section.rollouts').length === 1")
    page.get_by_label("Split").select_option("val")
    page.wait_for_function("() => location.hash.includes('/val/10')")
    # The list has the new value before the page is drawn again.
    page.wait_for_function(
        """() => [...document.querySelectorAll("#show option")].at(-1)?.innerText === "answers cut by length" """
    )


@pytest.mark.parametrize("colour", ["logprob", "gap", "ratio", "advantage", "entropy"])
def test_tokens_have_the_colour_and_the_numbers_of_the_record(page: Any, serve: Any, root: Path, colour: str) -> None:
    page.goto(f"{serve(make_view(root)).url}{ROLLOUT}?colour={colour}&figures=1")
    rollout = rollouts.rollout(folder_of(root), "train", 1, 0, 1)
    sequence, turn = rollout["sequences"][0], rollout["histories"][0]["entries"][2]["turn"]
    tokens = page.locator(".turn.role-assistant .tokens").first.locator(".token")
    page.wait_for_selector(".token[data-figure]")
    facts = page.locator("dl.facts").first.inner_text()
    advantage = next(advantage for advantage in sequence["advantages"] if advantage is not None)
    assert "mean of its group" in facts and f"{rollout['group_mean']:.4g}" in facts and f"{advantage:.4g}" in facts
    assert tokens.count() == turn["stop"] - turn["start"]
    seen = tokens.evaluate_all(
        "all => all.map(e => [e.className, e.style.getPropertyValue('--level'), Number(e.dataset.place), e.textContent])"
    )
    for name, level, position, text in seen:
        logprob, trainer = sequence["sampled_logprobs"][position], sequence["trainer_logprobs"][position]
        assert text == sequence["texts"][position]
        value = {"logprob": logprob, "gap": round(trainer - logprob, 5), "entropy": sequence["entropies"][position]}
        if colour in value:
            assert ("minus" in name) == (value[colour] < 0), (text, value[colour])
        if colour == "logprob":
            assert float(level) == pytest.approx(min(1, -logprob / 5), abs=1e-3)
        assert ("clipped" in name) == sequence["is_clipped"][position]
    for number in (0, 5, 20):
        tokens.nth(number).hover()
        index = seen[number][2]
        tip = page.inner_text("#tip")
        assert f"log-probability {sequence['sampled_logprobs'][index]} " in tip.replace("e-0", "e-")
        assert f"id {sequence['ids'][index]}, position {index}" in tip
        for line in ("ratio", "advantage", "entropy", "gap", "trained"):
            assert line in tip, tip
        assert float(re.findall(r"ratio ([\d.e-]+)", tip)[0]) == sequence["ratios"][index]
        assert float(re.findall(r"trainer's (\S+)", tip)[0]) == sequence["trainer_logprobs"][index]


def test_a_ratio_that_is_rounded_to_zero_has_a_colour(page: Any, serve: Any, root: Path) -> None:
    page.goto(serve(make_view(root)).url)
    scale = page.evaluate(
        """async () => (await import("/page/tokens.js")).scaleOf("ratio", [
            { texts: ["a", "b"], ratios: [0, 2] },
        ])"""
    )
    assert scale == pytest.approx(math.log(1e5))


def test_turns_say_where_their_tokens_come_from(page: Any, serve: Any, root: Path) -> None:
    url = serve(make_view(root)).url
    page.goto(f"{url}{RUN}/rollout/train/1/3/1?colour=trained")
    page.wait_for_selector(".origin")
    first, second = page.locator(".origin").all_inner_texts()
    assert "ids" in first and "sampled by step 11" in first and "of sequence 0" in first
    assert "ledger" in second and "changed" in second and "of sequence 1" in second
    page.goto("about:blank")  # otherwise the elements of the page before are still there
    page.goto(f"{url}{RUN}/rollout/train/1/5/0")
    page.wait_for_selector(".badge:text-is('dropped')")
    assert "the engine's record has expired" in page.inner_text("main")
    page.goto("about:blank")
    page.goto(f"{url}{RUN}/rollout/val/5/0/0")
    page.wait_for_selector("text=No token of this rollout has recorded numbers.")
    assert page.locator(".token").count() == 0


def test_rollouts_appear_on_a_page_that_was_open_before_them(page: Any, serve: Any, root: Path) -> None:
    folder = ModelFolder(root, "demo", "early")
    folder.create(folder_of(root).read().model_copy(update={"name": "early"}), root / "engine.log")
    page.goto(serve(make_view(root)).url + "#/run/demo/early/rollouts")
    page.wait_for_selector("text=This run has no rollouts on disk.")
    source = folder_of(root).trajectories_file("train", 1)
    for step in (1, 2):
        file = folder.trajectories_file("train", step)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source.read_bytes())
        log(folder, step, {"train/reward": 0.5})
        if step == 1:
            page.wait_for_selector("a.card")
            page.get_by_label("Text").focus()
    page.wait_for_function("() => document.querySelector('#steps')?.max === '1'")
    assert page.evaluate("document.activeElement.id") == "text", "the field keeps the focus"
    page.get_by_label("Later step").click()
    page.wait_for_function("() => location.hash.endsWith('/rollouts/train/2')")


def test_the_token_tree_states_the_saving_and_opens_rollouts(page: Any, serve: Any, root: Path) -> None:
    page.goto(f"{serve(make_view(root)).url}{RUN}/tree/1/0")
    page.wait_for_selector(".block")
    assert re.search(r"626 tokens instead of 1,537: 59.3 % less", page.inner_text(".saving"))
    board = page.locator(".board").bounding_box()
    widths = page.locator(".board .block").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    assert len(widths) == 13 and all(width <= board["width"] for width in widths)
    page.locator(".board .block").first.click()
    assert "You are a travel agent" in page.inner_text("main pre")
    page.get_by_role("link", name="rollout 5").click()
    page.wait_for_selector("b:text-is('rollout 5')")


def test_checkpoints_give_names_and_commands_to_copy(page: Any, serve: Any, root: Path) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{serve(make_view(root)).url}{RUN}/checkpoints")
    best = Runs(root).history(folder_of(root)).best_step("val/reward")
    row = page.locator("tr", has=page.locator(".badge.good"))
    assert row.locator("th .number").inner_text() == str(best)
    page.get_by_role("button", name=f"Copy art export demo/webnav-8b@{best} DIR").click()
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"art export demo/webnav-8b@{best} DIR"


def test_a_running_server_shows_its_time_and_its_jobs(page: Any, serve: Any, root: Path) -> None:
    served = serve(make_live(root))
    page.goto(served.url)
    page.wait_for_selector("h2:text-is('Where the time goes')")
    assert "51% of the last 10 minutes: the engine samples" in page.inner_text("main")
    page.get_by_role("link", name="Jobs").click()
    page.wait_for_selector("text=31 of 48")
    assert "waits for 1 earlier job, of demo/webnav-8b" in page.inner_text("main")
    page.get_by_role("button", name="Cancel the job of demo/sql-repair").click()
    page.get_by_role("button", name="No").click()
    states = {key: info.state for key, info in served.app.state.server.infos.items()}
    assert states["job-1"] == "queued", "nothing happens without the confirmation"
    page.get_by_role("button", name="Cancel the job of demo/sql-repair").click()
    page.get_by_role("button", name="Yes, cancel it").click()
    page.wait_for_selector("text=The job of demo/sql-repair is cancelled.")
    assert served.app.state.server.infos["job-1"].state == "cancelled"
    page.get_by_role("link", name="Server").click()
    page.wait_for_selector("text=the disk is nearly full")


def test_a_model_shows_how_it_learns_from_scores(page: Any, serve: Any, root: Path) -> None:
    folder = folder_of(root)
    choices = scores.choices_of(rollouts.rollout(folder, "train", 1, 0, 1)["histories"])
    make_scores(root, folder, choice=choices[0])
    page.goto(serve(make_live(root)).url + RUN)
    panel = page.locator("section[aria-labelledby=learning]")
    panel.wait_for()
    text = panel.inner_text()
    assert "412 of 800 scored answers, +0.040 (z 1.1)" in text and "61 for a batch of 128" in text
    assert re.search(r"step 12 serves\s+0.613 0.556 to 0.670\s+288 scores of 201 users", text)
    assert "step 8 was set aside" in text and "13 min" in text
    widths = [float(bar.evaluate("bar => bar.style.width.slice(0, -1)")) for bar in panel.locator(".rates .fill").all()]
    assert widths == pytest.approx([11.4, 17.0])
    page.locator(".plot").first.scroll_into_view_if_needed()
    page.wait_for_selector(".plot.js-plotly-plot")
    assert "Scores" in page.locator(".chart h3").all_inner_texts()[1]
    shapes = page.evaluate(
        "document.querySelector('.plot.js-plotly-plot').layout.shapes.map(({x0, line}) => [x0, line.dash])"
    )
    assert shapes == [[12, "solid"], [8, "dot"], [4, "solid"]], "releases on the reward"
    page.goto("about:blank")
    page.goto(serve(make_live(root)).url + ROLLOUT)
    listed = page.locator("section[aria-labelledby=scores]")
    listed.wait_for()
    assert re.search(r"(thumb|tests) [01] by [0-9a-f]{8}, scored, ", listed.inner_text())


def test_a_model_without_scores_has_no_section_about_them(page: Any, serve: Any, root: Path) -> None:
    page.goto(serve(make_view(root)).url + RUN)
    page.wait_for_selector(".plot.js-plotly-plot")
    assert page.locator("#learning").count() == 0 and "Vertical lines" not in page.inner_text("main")


def test_a_job_that_runs_again_shows_its_progress(page: Any, serve: Any, root: Path) -> None:
    served = serve(make_live(root))
    infos = served.app.state.server.infos
    error = ErrorDetail(message="the trainer died")
    infos["job-0"] = infos["job-0"].model_copy(update={"error": error})
    page.goto(f"{served.url}/#/jobs")
    page.wait_for_selector("[data-job='job-0'] >> text=31 of 48")
    assert "the trainer died" not in page.inner_text("main")


def test_a_job_has_its_duration_its_step_and_its_notes(page: Any, serve: Any, root: Path) -> None:
    served = serve(make_live(root))
    infos = served.app.state.server.infos
    note = "in 2 groups all trajectories have the same sampled tokens"
    report = infos["job-2"].report.model_copy(update={"notes": [note]})
    infos["job-2"] = infos["job-2"].model_copy(update={"report": report})
    page.goto(f"{served.url}/#/jobs")
    row = page.locator("[data-job='job-2']")
    row.locator("summary").click()
    with page.expect_response(lambda response: "state=done" in response.url):
        pass
    page.wait_for_timeout(200)
    assert note in row.inner_text(), "it stays open"
    assert "1 min 37 s" in row.inner_text()
    row.get_by_role("link", name="30").click()
    page.wait_for_function("() => location.hash.endsWith('/rollouts/train/30')")


def test_a_click_survives_a_refresh_while_the_button_is_pressed(page: Any, serve: Any, root: Path) -> None:
    served = serve(make_live(root))
    page.goto(f"{served.url}/#/jobs")
    cancel = page.get_by_role("button", name="Cancel the job of demo/sql-repair")
    cancel.hover()
    page.mouse.down()
    with page.expect_response(lambda response: "state=done" in response.url):
        pass  # the list's next refresh
    page.wait_for_timeout(200)
    page.mouse.up()
    page.wait_for_selector("text=Yes, cancel it")


def test_cells_that_do_not_change_are_the_same_elements_after_a_refresh(page: Any, serve: Any, root: Path) -> None:
    """A pointer on its way to a button still meets it, whatever the other cells of its row do."""
    served = serve(make_live(root))
    infos = served.app.state.server.infos
    page.goto(f"{served.url}/#/jobs")
    page.get_by_role("button", name="Cancel the job of demo/sql-repair").click()
    yes = page.get_by_role("button", name="Yes, cancel it").element_handle()
    for waits_for in ("2 earlier jobs", "nothing"):
        infos["job-1"] = infos["job-1"].model_copy(update={"waits_for": waits_for})
        page.wait_for_selector(f"text=waits for {waits_for}")
        assert yes.evaluate("button => button.isConnected")
    yes.click()
    page.wait_for_selector("text=The job of demo/sql-repair is cancelled.")


def test_times_go_on_while_a_page_is_open(page: Any, serve: Any, root: Path) -> None:
    page.clock.install()
    page.goto(f"{serve(make_view(root)).url}{RUN}/checkpoints")
    shown = page.locator("tbody time").last
    before = shown.inner_text()
    page.clock.fast_forward("48:00:00")
    page.wait_for_function(
        "before => [...document.querySelectorAll('tbody time')].at(-1).textContent !== before", arg=before
    )
    assert shown.inner_text() == "2 d ago"


def test_an_error_is_shown_until_the_next_success(page: Any, serve: Any, root: Path) -> None:
    page.goto(f"{serve(make_view(root)).url}#/compare?runs=demo/webnav-8b")
    page.wait_for_selector("#status:text-is('Connected')")
    page.route("**/history**", lambda route: route.abort())
    page.get_by_label("By").select_option("hours")
    page.wait_for_selector("#status.bad:has-text('does not answer')")
    assert page.get_by_text("by hours since the first step").count() == 2, "the old numbers"
    page.unroute("**/history**")
    log(folder_of(root), NUM_STEPS + 1, {"train/reward": 0.987})
    page.wait_for_selector("#status:text-is('Connected')")
    page.wait_for_selector("[title='0.987']")


def test_a_comparison_names_runs_that_are_gone(page: Any, serve: Any, root: Path) -> None:
    page.goto(f"{serve(make_view(root)).url}#/compare?runs=demo/gone,demo/webnav-8b")
    page.wait_for_selector(".js-plotly-plot")
    assert "No such run: demo/gone" in page.inner_text("main")
    assert captions(page)["Reward"] == {"demo/webnav-8b": rows_of(root)[NUM_STEPS]["train/reward"]}


def test_hours_are_those_since_the_first_row(page: Any, serve: Any, root: Path) -> None:
    rows = [
        {"step": 0, "val/reward": 0.5, "recorded_at": "2026-01-01T12:00:00+00:00"},
        {"step": 1, "train/reward": 0.1, "recorded_at": "2026-01-01T10:00:00+00:00"},
        {"step": 2, "train/reward": 0.2, "recorded_at": "2026-01-01T11:00:00+00:00"},
    ]
    file = folder_of(root).path / "history.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.goto(f"{serve(make_view(root)).url}#/compare?runs=demo/webnav-8b&by=hours")
    page.wait_for_function("() => document.querySelector('.plot')?.data?.length")
    plot = page.evaluate("(({ data, layout }) => [data[0].x, layout.xaxis.range])(document.querySelector('.plot'))")
    assert plot == [[0, 1], [0, 2]], "step 0 has no reward"


def test_the_chosen_step_is_the_newest_again_after_a_rollback(page: Any, serve: Any, root: Path) -> None:
    page.goto(serve(make_view(root)).url + RUN)
    page.wait_for_selector(".js-plotly-plot")
    page.get_by_label("Numbers of").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(f"() => document.querySelector('#at')?.textContent.startsWith('step {NUM_STEPS - 1},')")
    folder_of(root).roll_back(NUM_STEPS - 3)
    page.wait_for_function(
        f"() => document.querySelector('#at')?.textContent.startsWith('step {NUM_STEPS - 3} (newest)')"
    )


def test_a_server_with_keys_asks_for_one(page: Any, serve: Any, root: Path) -> None:
    app = make_view(root)
    authentication: Any = next(middleware for middleware in app.user_middleware if "keys" in middleware.kwargs)
    few = ApiKey(key="few", projects=frozenset({"other"}))
    authentication.kwargs["keys"] = Keys((ApiKey(key="right"), few))
    page.goto(f"{serve(app).url}{RUN}")
    page.wait_for_selector("#key-form:not([hidden])")
    assert page.inner_text("#status") == "The server needs an API key."
    for key, wanted in (("wrong", "unknown API key"), ("few", "does not cover project 'demo'")):
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        page.wait_for_selector(f'main:has-text("{wanted}")')
        page.wait_for_selector("#key-form:not([hidden])")
    page.get_by_label("API key").fill("right")
    page.keyboard.press("Enter")
    page.wait_for_selector(".js-plotly-plot")
    page.wait_for_selector("#status:text-is('Connected')")
    assert page.locator("#key-form").is_hidden()
    page.reload()
    page.wait_for_selector(".js-plotly-plot")
    assert page.evaluate("JSON.stringify(localStorage)") == "{}", "the key leaves with the tab"
    assert "right" not in page.url


def test_the_page_says_when_the_server_does_not_answer_and_comes_back(page: Any, serve: Any, root: Path) -> None:
    served = serve(make_view(root))
    page.goto(served.url)
    page.wait_for_selector("#status:text-is('Connected')")
    served.stop()
    page.wait_for_selector("#status.bad:has-text('does not answer')")
    log(folder_of(root), NUM_STEPS + 1, {"train/reward": 0.987})
    serve(make_view(root), served.port)
    page.wait_for_selector("#status:text-is('Connected')")
    page.wait_for_selector("[title='0.987']")
