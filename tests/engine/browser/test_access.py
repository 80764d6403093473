"""For whom and on what the page works: keyboard, screen readers, phones, both themes, hostile contents, addresses."""

import gzip
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from art_watch.view import make_view
from tests.fakes.page_server import make_live
from tests.makers.demo_groups import HOSTILE

RUN = "#/run/demo/webnav-8b"
COMPARED = "demo%2Fwebnav-8b%2Cdemo%2Fsql-repair"
PAGES = {
    "runs": "#/",
    "charts": RUN,
    "rollouts": f"{RUN}/rollouts/train/1",
    "rollout": f"{RUN}/rollout/train/1/4/3?colour=gap&figures=1",
    "kinds": f"{RUN}/rollout/train/1/3/1?colour=trained",
    "val": f"{RUN}/rollout/val/5/0/0",
    "tree": f"{RUN}/tree/1/0",
    "checkpoints": f"{RUN}/checkpoints",
    "compare": f"#/compare?runs={COMPARED}&by=hours",
    "jobs": "#/jobs",
    "server": "#/server?log=engine",
    "nothing": "#/run/demo/nothing",
    "unknown": "#/what/is/this",
}
CONTRAST = {"resultTypes": ["violations"], "runOnly": {"type": "rule", "values": ["color-contrast"]}}
"""The one rule that depends on the theme."""
READY = "main:not([aria-busy]):has(h1, .empty)"


def open_page(page: Any, url: str, hash_: str) -> None:
    page.goto("about:blank")  # otherwise the elements of the page before are still there
    page.goto(url + hash_)
    page.wait_for_selector(READY)
    if page.locator(".chart").count():
        page.locator(".chart").first.scroll_into_view_if_needed()  # what nobody sees is not drawn
        page.wait_for_selector(".js-plotly-plot .plotly")


def test_axe_finds_nothing_serious(page: Any, serve: Any, root: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    url = serve(make_live(root)).url
    for name, hash_ in PAGES.items():
        page.emulate_media(color_scheme="light", reduced_motion="reduce")  # no page is half faded in
        open_page(page, url, hash_)
        if name == "charts":
            page.get_by_role("button", name="Tags, notes, price, name").click()
            page.wait_for_selector("#notes")
            page.get_by_role("button", name="Delete this run").click()
        violations = axe.run(page).response["violations"]
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        violations += axe.run(page, options=CONTRAST).response["violations"]
        bad = {
            violation["id"]: [node["html"][:200] for node in violation["nodes"][:3]]
            for violation in violations
            if violation["impact"] in ("serious", "critical")
        }
        assert not bad, (name, bad)


def test_a_phone_scrolls_tables_and_not_the_page(page: Any, serve: Any, root: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    url = serve(make_live(root)).url
    for name, hash_ in PAGES.items():
        open_page(page, url, hash_)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        for target in page.locator("header a:visible, header button").all():
            box = target.bounding_box()
            assert box["x"] + box["width"] <= 390, name
    open_page(page, url, PAGES["runs"])
    assert page.evaluate("document.querySelector('.scroll').scrollWidth") > 390


@pytest.mark.parametrize("width", [400, 1000])
def test_cards_and_jobs_are_whole_without_scrolling(page: Any, serve: Any, root: Path, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    url = serve(make_live(root)).url
    open_page(page, url, PAGES["rollouts"])
    page.wait_for_selector("a.card")
    right = "all => Math.max(...all.map(card => card.getBoundingClientRect().right))"
    assert 0 < page.locator("a.card, .card.failure").evaluate_all(right) <= width
    open_page(page, url, PAGES["jobs"])
    page.wait_for_selector("progress")
    for element in (
        page.locator("progress"),
        page.get_by_text("the gap is 1.3"),
        page.get_by_role("button", name="Cancel the job").first,
    ):
        box = element.bounding_box()
        assert box["x"] + box["width"] <= width - 12, element


def test_hostile_text_stays_text_everywhere(page: Any, serve: Any, root: Path) -> None:
    folder = root / "demo" / "models" / "webnav-8b"
    rollouts = folder / "trajectories" / "train" / "0001.jsonl.gz"
    lines = gzip.decompress(rollouts.read_bytes()).decode().splitlines()
    group = json.loads(lines[4])
    attack = '"><img src=x onerror="window.wasHit=1"><svg onload="window.wasHit=1">'
    group["metadata"] = {attack: attack}
    group["exceptions"] = [{"type": attack, "message": attack, "traceback": attack}]
    trajectory = group["trajectories"][3]
    trajectory["metrics"] = {attack: 1.0}
    trajectory["logs"] = [attack]
    trajectory["messages"][1]["role"] = attack
    trajectory["messages"][2]["message"]["tool_calls"][0]["function"]["name"] = attack
    trajectory["turns"][1]["origin"] = trajectory["turns"][1]["continues"] = attack
    trajectory["messages"][4]["finish_reason"] = attack
    lines[4] = json.dumps(group)
    rollouts.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    record = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(record | {"base_model": attack}))
    (root / "logs").mkdir()
    (root / "logs" / "engine.log").write_text(f"{attack}\n")
    url = serve(make_live(root)).url
    for name, hash_ in PAGES.items():
        open_page(page, url, hash_)
        for summary in page.locator("summary").all():
            summary.click()
        for token in page.locator(".token, .block").all()[:40]:
            token.hover()
        injected = page.evaluate(
            "document.querySelectorAll('body script, img, svg:not(.spark, .main-svg, #js-plotly-tester), [onerror], [onload]').length"
        )
        assert injected == 0, name
        if name in ("rollouts", "rollout", "runs", "server"):
            assert attack in page.evaluate("document.body.innerText").replace("\\", ""), name
    open_page(page, url, f"{RUN}/tree/1/4")
    page.locator(".board .block").first.click()
    assert HOSTILE in page.inner_text("main pre")
    open_page(page, url, f"#/?filter={quote(attack + '?')}")
    assert page.input_value("#filter") == attack + "?" and attack in page.inner_text(".empty")
    open_page(page, url, f"{RUN}/rollouts/train/1?text=%3Cimg%20src%3Dx")
    assert page.input_value("#text") == "<img src=x"
    assert page.evaluate("window.wasHit") is None


def test_addresses_survive_reload_back_and_forward(page: Any, serve: Any, root: Path) -> None:
    url = serve(make_view(root)).url
    open_page(page, url, f"{RUN}/rollout/train/3/0/2?colour=gap")
    assert page.input_value("#colour") == "gap"
    page.get_by_label("Colour by").select_option("entropy")
    page.get_by_label("numbers").check()
    page.reload()
    page.wait_for_selector(".token[data-figure]")
    assert page.input_value("#colour") == "entropy" and "figures=1" in page.url
    page.get_by_role("button", name="Next rollout").click()
    page.wait_for_selector("b:text-is('rollout 3')")
    assert page.input_value("#colour") == "entropy", "settings stay"
    page.go_back()
    page.wait_for_selector("b:text-is('rollout 2')")
    page.go_forward()
    page.wait_for_selector("b:text-is('rollout 3')")
    assert page.title() == "Rollout train 3/0/3 – demo/webnav-8b – ART"
    page.goto(f"{url}#/run/%E0%A4%A")
    page.wait_for_selector("text=There is no page at this address.")


def test_the_place_on_a_long_page_is_found_again(page: Any, serve: Any, root: Path) -> None:
    open_page(page, serve(make_view(root)).url, PAGES["rollouts"])
    card = page.locator("section.rollouts").nth(5).locator("a.card").first
    card.scroll_into_view_if_needed()
    height = page.evaluate("scrollY")
    card.click()
    page.wait_for_selector(".token")
    assert height > 300 and page.evaluate("scrollY") == 0
    page.go_back()
    page.wait_for_selector(".cards")
    page.wait_for_function("height => Math.abs(scrollY - height) < 50", arg=height)


def test_arrows_change_steps_and_rollouts_and_escape_leads_up(page: Any, serve: Any, root: Path) -> None:
    open_page(page, serve(make_view(root)).url, f"{RUN}/rollouts/train/2")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("b:text-is('step 3')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("b:text-is('step 2')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("b:text-is('step 1')")
    page.keyboard.press("ArrowLeft")
    assert page.get_by_role("button", name="Earlier step").is_disabled()
    page.locator("a.card").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("b:text-is('rollout 3')")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("b:text-is('rollout 4')")
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_selector("b:text-is('step 2')")
    ups = {f"{RUN}/rollouts/train/2": "Rollouts", RUN: "Charts", "#/": "Runs"}
    for hash_, title in ups.items():
        page.keyboard.press("Escape")
        page.wait_for_function("hash => location.hash === hash", arg=hash_)
        # The address changes first; until the title does, Escape is a key of the page before.
        page.wait_for_function("title => document.title.startsWith(title)", arg=title)


def test_tokens_are_read_with_the_arrow_keys(page: Any, serve: Any, root: Path) -> None:
    open_page(page, serve(make_view(root)).url, f"{RUN}/rollout/train/1/0/1")
    page.locator(".tokens").first.focus()
    seen = []
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        seen.append(page.inner_text("#tip").splitlines()[0])
    for text, token in zip(seen, ("I", " search", " with"), strict=True):
        assert text.startswith(f'"{token}" id '), text
    described = page.evaluate("document.activeElement.getAttribute('aria-describedby')")
    assert described == "tip"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden() and "/rollout/" in page.url
    page.wait_for_selector("b:text-is('rollout 1')")


NAME = """(element) => [element.tagName, element.id, element.getAttribute("href"), element.getAttribute("aria-label"),
    element.textContent.slice(0, 30)].join()"""
"""Of an element; it stays when the page shows new data."""


def test_everything_is_reached_with_tab_and_shows_the_focus(page: Any, serve: Any, root: Path) -> None:
    url = serve(make_live(root)).url
    for name in ("runs", "rollout", "tree", "jobs"):
        open_page(page, url, PAGES[name])
        page.wait_for_selector("#status:text-is('Connected')")
        page.wait_for_timeout(300)
        wanted = page.evaluate(
            f"""() => [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")]
                .filter((element) => !element.disabled && element.checkVisibility()).map({NAME})"""
        )
        page.evaluate("document.activeElement.blur()")
        reached: set[str] = set()
        for _ in range(len(wanted) + 5):
            page.keyboard.press("Tab")
            focused, outline = page.evaluate(
                f"""() => [({NAME})(document.activeElement), getComputedStyle(document.activeElement).outlineStyle]"""
            )
            if not focused.startswith("BODY"):
                reached.add(focused)
                assert outline != "none", (name, focused)
        assert set(wanted) - reached == set(), name


def test_the_theme_follows_the_system_until_it_is_chosen(page: Any, serve: Any, root: Path) -> None:
    open_page(page, serve(make_view(root)).url, RUN)
    background = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    assert dark != light
    line = "document.querySelector('.js-line').style.stroke"
    before = page.evaluate(line)
    page.get_by_role("button", name="Dark or light theme").click()
    assert page.evaluate(background) == dark
    page.wait_for_function("before => document.querySelector('.js-line').style.stroke !== before", arg=before)
    page.reload()
    assert page.evaluate(background) == dark, "the choice stays"
