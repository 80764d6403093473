"""The page over 200 runs with 5,000 steps and 100,000 rollouts: it opens, and the server stays small.

The seconds in the browser are printed (`pytest -s`)."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.browser.conftest import browser, page
from tests.makers.demo import NAMES, make_demo

__all__ = ["browser", "page"]  # fixtures

RUNS, STEPS, ROLLOUTS = 200, 25, 20
LONG_HISTORY = 5000
"""Rows of one run."""
SERVER_BYTES = 300e6
SERVER = """
import sys, uvicorn
from pathlib import Path
from art_watch.view import make_view
uvicorn.run(make_view(Path(sys.argv[1])), host="127.0.0.1", port=0, access_log=False, timeout_graceful_shutdown=1)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("scale")
    folders = make_demo(path, RUNS, STEPS, ROLLOUTS, token_steps=1)
    assert RUNS * STEPS == 5000 and RUNS * STEPS * ROLLOUTS == 100_000
    long = folders[1].path / "history.jsonl"
    rows = [json.loads(line) for line in long.read_text().splitlines()]
    with long.open("a") as history:
        for step in range(STEPS + 1, LONG_HISTORY + 1):
            row = rows[step % STEPS] | {"step": step, "training_step": step}
            history.write(json.dumps(row) + "\n")
    yield path
    for file in path.rglob("*.*"):
        if file.is_file():
            file.unlink()  # hundreds of megabytes


@pytest.fixture
def server(root: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The page in a process of its own, which has read nothing yet."""
    command = [sys.executable, "-c", SERVER, str(root)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        match = next(filter(None, (re.search(r"http://[\d.]+:\d+", line) for line in lines)))
        yield f"{match[0]}/", psutil.Process(process.pid)
        process.terminate()
        process.stderr.read()


def seconds_until(page: Any, condition: str) -> float:
    """Seconds from the start of the navigation, or from the mark "start", until a condition holds."""
    page.wait_for_function(f"() => {condition} && performance.mark('end')")
    return page.evaluate(
        "(performance.getEntriesByName('end').at(-1).startTime "
        "- (performance.getEntriesByName('start').at(-1)?.startTime ?? 0)) / 1000"
    )


def go(page: Any, hash_: str) -> None:
    page.evaluate("hash => { performance.mark('start'); location.hash = hash; }", hash_)


def test_pages_open_and_the_server_stays_small(page: Any, server: tuple[str, psutil.Process]) -> None:
    url, process = server
    figures: dict[str, float] = {}
    page.goto(url, wait_until="commit")
    all_rows = f"document.querySelectorAll('tbody tr').length === {RUNS}"
    figures["first page, nothing read yet"] = seconds_until(page, all_rows)
    page.goto("about:blank")
    page.goto(url, wait_until="commit")
    figures["first page"] = seconds_until(page, all_rows)
    page.get_by_label("Filter").fill("sweep-1")
    go(page, f"#/run/demo/{NAMES[0]}/rollouts/train/{STEPS}")
    figures["rollouts of a step"] = seconds_until(page, "document.querySelector('a.card')")
    go(page, f"#/run/demo/{NAMES[0]}/rollout/train/{STEPS}/0/3?colour=gap")
    figures["viewer of a rollout"] = seconds_until(page, "document.querySelector('.token.plus')")
    go(page, f"#/run/demo/{NAMES[0]}/tree/{STEPS}/0")
    figures["token tree"] = seconds_until(page, "document.querySelector('.board .block')")
    go(page, f"#/run/demo/{NAMES[1]}")
    drawn = "document.querySelectorAll('.js-plotly-plot .js-line').length > 6"
    figures["charts of 5,000 steps"] = seconds_until(page, drawn)
    for name in NAMES:
        go(page, f"#/run/demo/{name}")
        seconds_until(page, f"document.title.endsWith('demo/{name} – ART')")
    memory = process.memory_info().rss
    for name, seconds in figures.items():
        print(f"{name}: {seconds:.2f} s")
    print(f"server: {memory / 1e6:.0f} MB")
    assert memory < SERVER_BYTES
