"""The rules, the position values and the rewards of the examples' games, and that art/tiny was taught their prompts."""

import functools
import importlib
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import art

sys.path += [str(Path(__file__).parents[3] / folder) for folder in ("examples", "scripts")]
taught: Any = importlib.import_module("tiny_model.games")
tic_tac_toe: Any = importlib.import_module("tic_tac_toe")
rules: Any = importlib.import_module("tic_tac_toe_rules")
game_2048: Any = importlib.import_module("2048")
after_move, result, to_move, value = (getattr(rules, name) for name in ("after_move", "result", "to_move", "value"))

boards = st.builds(
    lambda seed, moves: rules.random_opening(random.Random(seed), moves), st.integers(0, 10_000), st.integers(0, 7)
)
rows = st.lists(st.sampled_from([0, 0, 2, 4, 8, 16]), min_size=4, max_size=4)
boards_2048 = st.lists(rows, min_size=4, max_size=4)


class Player:
    """Stands for a model: its k-th answer of a game is the k-th that it was given."""

    def __init__(self, *answers: str) -> None:
        self.answers = answers
        self.asked: list[list[dict[str, Any]]] = []
        self.chat = SimpleNamespace(completions=self)

    def openai_client(self) -> "Player":
        return self

    def get_inference_name(self) -> str:
        return "tests/player"

    async def create(self, messages: list[dict[str, Any]], **_: object) -> SimpleNamespace:
        self.asked.append(messages)
        turn = sum(message["role"] == "user" for message in messages)
        message = {"role": "assistant", "content": self.answers[turn - 1]}
        choice = {"index": 0, "finish_reason": "stop", "logprobs": None, "message": message}
        return SimpleNamespace(choices=[art.types.Choice.model_validate(choice)])


class Unreachable(Player):
    async def create(self, messages: list[dict[str, Any]], **_: object) -> SimpleNamespace:
        raise ConnectionError("no server there")


def player(*moves: str) -> Player:
    return Player(*(f"<move>{move}</move>" for move in moves))


# --- tic-tac-toe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        ("xxxoo____", 1.0),
        ("ooo_xx__x", 0.0),
        ("x_oxo_x__", 1.0),
        ("x_oox___x", 1.0),
        ("xxo_o_o_x", 0.0),
        ("xoxxoxoxo", 0.5),
        ("xox_o____", None),
        ("_________", None),
    ],
)
def test_a_game_ends_with_a_line_or_a_full_board(board: str, expected: float | None) -> None:
    assert result(board, "x") == expected
    assert result(board, "o") == (None if expected is None else 1 - expected)


@given(boards)
def test_sides_alternate_and_a_move_takes_a_free_cell(board: str) -> None:
    free = rules.free_cells(board)
    assert result(board, "x") is None and len(free) == board.count("_") > 0
    for cell in free:
        after = after_move(board, cell)
        assert {to_move(board), to_move(after)} == {"x", "o"}
        assert rules.free_cells(after) == [other for other in free if other != cell]


def test_position_values_worked_by_hand() -> None:
    """x o _ / x o o / _ _ x: x wins by C1. After A3, o wins by C2 or lets x draw. After C2, o at A3 loses to C1, or C1 draws."""
    board = "xo_xoo__x"
    assert value(board, "x") == value(after_move(board, "C1"), "x") == 1.0
    assert value(after_move(board, "A3"), "x") == (0.0 + 0.5) / 2
    assert value(after_move(board, "A3"), "o") == 1.0
    assert value(after_move(board, "C2"), "x") == (1.0 + 0.5) / 2


@functools.cache
def minimax(board: str, symbol: str) -> float:
    end = result(board, symbol)
    if end is not None:
        return end
    values = [minimax(after_move(board, cell), symbol) for cell in rules.free_cells(board)]
    return max(values) if to_move(board) == symbol else min(values)


@settings(deadline=None)
@given(boards.filter(lambda board: board.count("_") <= 7), st.sampled_from("xo"))
def test_a_random_player_leaves_no_less_than_the_best_one(board: str, symbol: str) -> None:
    assert minimax(board, symbol) <= value(board, symbol) <= 1.0


@pytest.mark.anyio
async def test_a_reward_is_half_the_result_and_half_what_the_moves_kept() -> None:
    sides = await tic_tac_toe.play("xo_xoo__x", {"x": player("A3"), "o": player("C2")})
    assert sides["x"].reward == (0.0 + 1 - 0.75) / 2
    assert sides["o"].reward == (1.0 + 1 - 0.0) / 2
    assert [sides[side].metrics["given_away"] for side in "xo"] == [0.75, 0.0]
    assert sides["o"].metrics["won"] and not sides["o"].metrics["illegal"]


@pytest.mark.anyio
@pytest.mark.parametrize("answer", ["<move>B2</move>", "<move>D4</move>", "I resign"])
async def test_an_illegal_move_loses_at_once_and_keeps_the_trajectory(answer: str) -> None:
    sides = await tic_tac_toe.play("_" * 9, {"x": player("B2"), "o": Player(answer)})
    assert sides["o"].reward == 0.0 and sides["o"].metrics["illegal"]
    assert sides["o"].messages()[-1]["content"] == answer
    assert sides["x"].reward > 0.9 and sides["x"].metrics["won"]


@pytest.mark.anyio
async def test_a_side_that_never_moved_has_no_trajectory_and_no_group() -> None:
    models = {"x": player("none"), "o": player("A1")}
    assert list(await tic_tac_toe.play("_" * 9, models)) == ["x"]
    groups = await tic_tac_toe.play_each_other(models, ["_" * 9, "x________"], 2)
    assert [len(group) for group in groups["x"]] == [2]
    assert [len(group) for group in groups["o"]] == [2]


@pytest.mark.anyio
async def test_a_network_error_is_no_move() -> None:
    with pytest.raises(ConnectionError):
        await tic_tac_toe.rollout(Unreachable(), "_" * 9)
    with pytest.raises(ConnectionError):
        await game_2048.rollout(Unreachable(), "0")


@pytest.mark.anyio
async def test_games_of_a_group_begin_with_one_prompt_that_the_tiny_model_knows() -> None:
    opening = "x_o______"
    model = player("A1")
    for _ in range(2):
        await tic_tac_toe.rollout(model, opening)
    system = {"role": "system", "content": taught.tictactoe_system()}
    turn = {"role": "user", "content": taught.tictactoe_turn({"A1": "x", "A3": "o"}, "x")}
    assert model.asked == [[system, turn]] * 2


def test_openings_have_both_sides_to_move_in_turn() -> None:
    openings = tic_tac_toe.draw_openings(random.Random(0), 8)
    assert [to_move(board) for board in openings] == ["x", "o"] * 4


# --- 2048 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "merged", "points"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], 0),
        ([0, 2, 0, 4], [2, 4, 0, 0], 0),
        ([2, 0, 2, 0], [4, 0, 0, 0], 4),
        ([2, 2, 2, 0], [4, 2, 0, 0], 4),
        ([2, 2, 2, 2], [4, 4, 0, 0], 8),
        ([2, 2, 4, 8], [4, 4, 8, 0], 4),
        ([4, 2, 2, 4], [4, 4, 4, 0], 4),
    ],
)
def test_a_tile_merges_once_and_from_the_side_it_moves_to(row: list[int], merged: list[int], points: int) -> None:
    assert game_2048.merge_row(row) == (merged, points)


def test_a_board_slides_in_four_directions() -> None:
    board = [[2, 0, 0, 2], [2, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
    empty = [0, 0, 0, 0]
    left = [[4, 0, 0, 0], [2, 0, 0, 0], [2, 0, 0, 0], empty]
    right = [[0, 0, 0, 4], [0, 0, 0, 2], [0, 0, 0, 2], empty]
    assert game_2048.slide(board, "left") == (left, 4)
    assert game_2048.slide(board, "right") == (right, 4)
    assert game_2048.slide(board, "up") == ([[4, 0, 0, 2], [2, 0, 0, 0], empty, empty], 4)
    assert game_2048.slide(board, "down") == ([empty, empty, [2, 0, 0, 0], [4, 0, 0, 2]], 4)


@given(boards_2048, st.sampled_from(["left", "right", "up", "down"]))
def test_sliding_keeps_the_sum_of_the_tiles(board: list[list[int]], direction: str) -> None:
    moved, points = game_2048.slide(board, direction)
    assert sum(map(sum, moved)) == sum(map(sum, board))
    assert points <= sum(map(sum, board))


@pytest.mark.anyio
async def test_the_games_of_a_seed_begin_on_one_board_that_the_tiny_model_can_read() -> None:
    model = Player("<move>left</move>", "that is all")
    first, second = [await game_2048.rollout(model, "0 1") for _ in range(2)]
    assert first.messages() == second.messages()
    assert first.reward == 0.0 and first.metrics["malformed"]
    system, turn = model.asked[0]
    assert all(part in system["content"] for part in taught.game_2048_system().split(". "))
    rows = [[int(tile.replace("_", "0")) for tile in row.split("|")] for row in turn["content"].split("\n")]
    assert turn["content"] == taught.game_2048_turn(rows)
    assert sum(tile > 0 for row in rows for tile in row) == 6


@pytest.mark.anyio
async def test_a_move_that_changes_nothing_is_a_move_lost() -> None:
    game = await game_2048.rollout(player(*["left"] * 10), "0")
    assert 0 < game.metrics["lost_moves"] < 10
    assert 0 < game.reward < 1 and len(game.messages()) == 21
