"""Chromium, and the page of a demo folder served by uvicorn in a thread. Without Chromium these tests are skipped."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.http_server import Served
from tests.makers.demo import make_demo
from tests.waiting import PATIENCE_SECONDS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NUM_STEPS = 12


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's event loop runs until the module ends: asynchronous tests run in other modules."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab in which no script fails, no dialog opens and nothing violates the page's security policy."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    tab = context.new_page()
    tab.set_default_timeout(1000 * PATIENCE_SECONDS)
    faults: list[str] = []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    tab.on("console", lambda message: "Content Security Policy" in message.text and faults.append(message.text))
    yield tab
    context.close()
    assert not faults


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo")
    make_demo(path, runs=3, steps=NUM_STEPS, rollouts=48)
    return path


@pytest.fixture
def root(demo: Path, tmp_path: Path) -> Path:
    """A copy of the demo folder, which the test may change."""
    return shutil.copytree(demo, tmp_path, symlinks=True, dirs_exist_ok=True)


@pytest.fixture
def serve() -> Iterator[Any]:
    """Serves applications until the test ends."""
    running: list[Served] = []

    def start(app: FastAPI, port: int = 0, lifespan: str = "on") -> Served:
        running.append(Served(app, port, lifespan))
        return running[-1]

    yield start
    for served in running:
        served.stop()
