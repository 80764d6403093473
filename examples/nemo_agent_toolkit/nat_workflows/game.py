"""The questions of the tic-tac-toe workflow to its model, and the reward of a game. The other examples have the same rules.

A game is written as the model's symbol and the boards after the model's moves: "x ____x____ o_x_x____". The word
"illegal" follows if an illegal answer ended the game.
"""

import re
import statistics
from functools import cache

from tic_tac_toe_rules import EMPTY, after_move, board_text, free_cells, result, to_move

SYSTEM = "You play tic-tac-toe. Rows are A to C, columns are 1 to 3. Answer with a free cell, like <move>B2</move>"
ILLEGAL = "illegal"


def start(row: str) -> tuple[str, str]:
    """The model's symbol and the board of a row of the data set: "x", or "o B2" with the moves made before."""
    symbol, *moves = row.split()
    board = EMPTY
    for cell in moves:
        board = after_move(board, cell)
    return symbol, board


def question(board: str) -> str:
    """The user turn, in the words that art/tiny knows."""
    return f"{board_text(board)}\nYou are {to_move(board)}."


def parse_move(answer: str, board: str) -> str | None:
    """The free cell that an answer names; None for any other answer."""
    match = re.fullmatch(r"<move>([ABC][123])</move>", answer.strip())
    return match[1] if match and match[1] in free_cells(board) else None


def score(game: str) -> float:
    """The reward, 0 to 1: the mean worth of the boards after the model's moves; an illegal answer counts as a board worth 0."""
    symbol, *boards = game.split()
    return statistics.fmean(0.0 if b == ILLEGAL else worth(b, symbol) for b in boards)


@cache
def worth(board: str, symbol: str) -> float:
    """The expected result of a side if both sides move at random: 1 a win, 0.5 a draw, 0 a loss."""
    end = result(board, symbol)
    if end is not None:
        return end
    return statistics.fmean(worth(after_move(board, cell), symbol) for cell in free_cells(board))
