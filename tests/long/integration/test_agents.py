"""Agents of libraries that no example shows, each as a separate program with the real server."""

import shutil
from pathlib import Path

import pytest

from tests.agents import JAVASCRIPT, ONE_TURN, PYTHON, make_environments, train
from tests.live import Server

SHORT = ["--steps", "2", "--groups", "8", "--held-out", "4"]
NEEDS_NODE = pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js")


@pytest.fixture(scope="session", autouse=True)
def environments() -> None:
    make_environments()


@pytest.mark.parametrize("agent", [*PYTHON, *(pytest.param(agent, marks=NEEDS_NODE) for agent in JAVASCRIPT)])
def test_an_agent_trains_unmodified_and_its_turns_join(server: Server, tmp_path: Path, agent: str) -> None:
    trained = train(server, tmp_path, agent, *SHORT)
    assert trained.steps == 2
    assert trained.sources.keys() <= {"ids", "ledger"}
    turns = 1 if agent in ONE_TURN else 1.3
    assert trained.sources.total() >= turns * trained.rollouts > 0
    # art/tiny thinks now and then, and its template drops what a user's message follows.
    later = trained.continuations
    assert agent in ONE_TURN or later["joined"] >= 0.8 * later.total() > 0, later
