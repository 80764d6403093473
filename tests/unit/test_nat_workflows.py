"""The game of examples/nemo_agent_toolkit: prompts that the tiny model knows, and rewards worked by hand."""

import importlib
import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "examples" / "nemo_agent_toolkit")]
games = importlib.import_module("tiny_model.games")
game = importlib.import_module("nat_workflows.game")


def test_prompts_are_those_that_the_model_was_made_of():
    assert games.tictactoe_system() == game.SYSTEM
    rng = random.Random(0)
    for length in range(9):
        moves = tuple(rng.sample(game.CELLS, length))
        board = {cell: "xo"[index % 2] for index, cell in enumerate(moves)}
        symbol = "xo"[length % 2]
        assert game.show(moves) == games.tictactoe_turn(board, symbol)
        assert game.is_over(moves) == games.is_over(board)


def test_only_a_free_cell_in_the_taught_form_is_a_move():
    assert game.parse_move("<move>A1</move>", ("B2",)) == "A1"
    for answer in ("<move>B2</move>", "<move>D1</move>", "A1", "I play <move>A1</move>"):
        assert game.parse_move(answer, ("B2",)) is None


def test_a_game_is_worth_the_mean_of_the_positions_moved_to():
    moves = ("A1", "B1", "A2", "B2", "A3")
    first = game.position_value(frozenset({"A1"}), frozenset(), "x")
    second = game.position_value(frozenset({"A1", "A2"}), frozenset({"B1"}), "x")
    assert 0.5 < first < second < 1.0
    assert game.score(moves, "x", False) == pytest.approx((first + second + 1.0) / 3)


def test_the_worth_of_a_position_is_the_mean_over_random_continuations():
    # A1 x A2 o A3 x / B1 o B2 x B3 o / C1 _ C2 x C3 _, o to move: C1 loses to C3, C3 loses to C1
    x, o = frozenset({"A1", "A3", "B2", "C2"}), frozenset({"A2", "B1", "B3"})
    assert game.position_value(x, o, "x") == 1.0
    # A1 x A2 o A3 x / B1 o B2 o B3 x / C1 x C2 _ C3 _, o to move: C2 wins, C3 leads to a draw
    x, o = frozenset({"A1", "A3", "B3", "C1"}), frozenset({"A2", "B1", "B2"})
    assert game.position_value(x, o, "x") == pytest.approx(0.25)


def test_an_illegal_answer_counts_as_a_position_worth_nothing():
    opening = game.score(("B2",), "x", False)
    assert opening == pytest.approx(0.75, abs=0.01)
    assert game.score(("B2", "A1"), "x", True) == pytest.approx(opening / 2)
    assert game.score((), "x", True) == 0.0


def test_every_row_of_the_data_is_a_position_of_its_player():
    file = ROOT / "examples" / "nemo_agent_toolkit" / "data" / "tic_tac_toe.json"
    rows = json.loads(file.read_text())
    assert len({row["id"] for row in rows}) == len(rows)
    for symbol, *moves in (row["question"].split() for row in rows):
        assert "xo"[len(moves) % 2] == symbol and set(moves) <= set(game.CELLS)
