"""The games validate every VAL_EVERY steps, against a server that answers every request with the same move."""

import argparse
import importlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import art
from tests.fakes.server import FakeArt

sys.path.append(str(Path(__file__).parents[3] / "examples"))
program: Any = importlib.import_module("program")
tic_tac_toe: Any = importlib.import_module("tic_tac_toe")
game_2048: Any = importlib.import_module("2048")

pytestmark = pytest.mark.anyio

MODEL = "/api/models/demo/agent"
FLAGS = argparse.Namespace(steps=11, groups=2, group_size=2, learning_rate=1e-3, model="art/tiny", learning_rates={})


@pytest.fixture
async def server() -> AsyncIterator[FakeArt]:
    """Trains step 10, then step 11."""
    server = FakeArt()
    server.steps["demo/agent"] = 9
    server.text = "<move>left</move> <move>B2</move>"
    names = ("reward", "score", "in_corner", "lost_moves", "malformed", "won", "illegal", "given_away")
    server.metrics = {f"train/{name}": 0.5 for name in names}
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def model(server: FakeArt) -> AsyncIterator[art.TrainableModel]:
    async with art.Backend(server.url) as backend:
        model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
        await model.register(backend)
        yield model


def check(server: FakeArt, output: str) -> list[Any]:
    """The groups of the one validation, which is that of step 10."""
    (logged,) = [request.json() for request in server.sent("POST", f"{MODEL}/log")]
    assert (logged["step"], logged["split"]) == (10, "val")
    (line,) = [line for line in output.splitlines() if line.startswith("Evaluation(demo/agent@10")]
    assert f"n={len(logged['groups'])}" in line
    return logged["groups"]


async def test_2048_is_validated_on_games_that_are_not_trained(
    server: FakeArt, model: art.TrainableModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.VAL_EVERY == 10
    await game_2048.train(model, 9, FLAGS)
    assert len(check(server, capsys.readouterr().out)) == 32


@pytest.mark.parametrize(("side", "num_boards"), [("both sides", 32), ("x", 16), ("o", 16)])
async def test_a_side_of_tic_tac_toe_is_validated_on_boards_with_its_turn(
    server: FakeArt, model: art.TrainableModel, capsys: pytest.CaptureFixture[str], side: str, num_boards: int
) -> None:
    is_alone = side == "both sides"
    flags = argparse.Namespace(**vars(FLAGS), self_play=not is_alone)
    await tic_tac_toe.train({side: model}, 9, flags)
    groups = check(server, capsys.readouterr().out)
    questions = [group["trajectories"][0]["messages_and_choices"][1]["content"] for group in groups]
    assert len(questions) == num_boards
    if not is_alone:
        assert all(question.endswith(f"You are {side}.") for question in questions)
