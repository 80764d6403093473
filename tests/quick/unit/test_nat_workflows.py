"""The game of examples/nemo_agent_toolkit: prompts that the tiny model knows, and rewards worked by hand."""

import importlib
import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
sys.path += [str(ROOT / "scripts"), str(EXAMPLES), str(EXAMPLES / "nemo_agent_toolkit")]
games = importlib.import_module("tiny_model.games")
game = importlib.import_module("nat_workflows.game")


def test_prompts_are_those_that_the_model_was_made_of():
    assert games.tictactoe_system() == game.SYSTEM
    rng = random.Random(0)
    for length in range(9):
        moves = rng.sample(games.CELLS, length)
        symbol, board = game.start(" ".join(["xo"[length % 2], *moves]))
        held = {cell: "xo"[index % 2] for index, cell in enumerate(moves)}
        assert game.question(board) == games.tictactoe_turn(held, symbol)


def test_only_a_free_cell_in_the_taught_form_is_a_move():
    board = "____x____"
    assert game.parse_move("<move>A1</move>", board) == "A1"
    for answer in ("<move>B2</move>", "<move>D1</move>", "A1", "I play <move>A1</move>"):
        assert game.parse_move(answer, board) is None


def test_the_worth_of_a_board_is_the_mean_over_random_continuations():
    # o to move: C1 lets x win at C3, C3 lets x win at C1
    assert game.worth("xoxoxo_x_", "x") == 1.0
    # o to move: C2 wins, C3 leads to a draw
    assert game.worth("xoxooxx__", "x") == pytest.approx(0.25)
    assert game.worth("xoxooxx__", "o") == pytest.approx(0.75)


def test_a_game_is_worth_the_mean_of_the_boards_moved_to():
    first, second = game.worth("x________", "x"), game.worth("xx_o_____", "x")
    assert 0.5 < first < second < 1.0
    assert game.score("x x________ xx_o_____ xxxoo____") == pytest.approx((first + second + 1.0) / 3)


def test_an_illegal_answer_counts_as_a_board_worth_nothing():
    assert game.score("x ____x____ illegal") == pytest.approx(game.worth("____x____", "x") / 2)
    assert game.score("x illegal") == 0.0


def test_every_row_of_the_data_is_a_board_of_its_player():
    rows = json.loads((EXAMPLES / "nemo_agent_toolkit" / "data" / "tic_tac_toe.json").read_text())
    assert len({row["id"] for row in rows}) == len(rows)
    for symbol, board in (game.start(row["question"]) for row in rows):
        assert game.question(board).endswith(f"You are {symbol}.")
