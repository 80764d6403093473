"""The rules of tic-tac-toe, the value of its boards, and boards as text."""

import random
import statistics
from functools import cache

CELLS = tuple(row + column for row in "ABC" for column in "123")
LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
EMPTY = "_" * 9
"""A board is a string with the symbols of its nine cells, row by row. x begins."""


def to_move(board: str) -> str:
    """The symbol whose turn it is."""
    return "x" if board.count("x") == board.count("o") else "o"


def free_cells(board: str) -> list[str]:
    return [cell for cell, symbol in zip(CELLS, board, strict=True) if symbol == "_"]


def after_move(board: str, cell: str) -> str:
    """The board after a move of the symbol whose turn it is."""
    index = CELLS.index(cell)
    return board[:index] + to_move(board) + board[index + 1 :]


def result(board: str, symbol: str) -> float | None:
    """The result for a side: 1 won, 0.5 drawn, 0 lost; None before the game has ended."""
    for line in LINES:
        held = {board[int(index)] for index in line}
        if held in ({"x"}, {"o"}):
            return float(held == {symbol})
    return None if "_" in board else 0.5


@cache
def value(board: str, symbol: str) -> float:
    """The expected result of a side that plays optimally against a random player."""
    end = result(board, symbol)
    if end is not None:
        return end
    values = [value(after_move(board, cell), symbol) for cell in free_cells(board)]
    return max(values) if to_move(board) == symbol else statistics.fmean(values)


def random_opening(rng: random.Random, num_moves: int) -> str:
    """The board of an unfinished game after `num_moves` random moves, at most 8."""
    board = EMPTY
    while board.count("_") > 9 - num_moves:
        board = after_move(board, rng.choice(free_cells(board)))
        if result(board, "x") is not None:
            board = EMPTY
    return board


def board_text(board: str) -> str:
    """Three lines such as "A1 _ A2 x A3 o"."""
    cells = [f"{cell} {symbol}" for cell, symbol in zip(CELLS, board, strict=True)]
    return "\n".join(" ".join(cells[first : first + 3]) for first in (0, 3, 6))
