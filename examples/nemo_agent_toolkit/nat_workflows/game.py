"""Tic-tac-toe: the prompts that art/tiny knows, and what a position is worth.

The prompts are, text by text, those of `scripts/tiny_model/games.py`, of which the model was made.
"""

import functools
import re
from collections.abc import Sequence

CELLS = tuple(row + column for row in "ABC" for column in "123")
LINES = (
    *(tuple(row + column for column in "123") for row in "ABC"),
    *(tuple(row + column for row in "ABC") for column in "123"),
    ("A1", "B2", "C3"),
    ("A3", "B2", "C1"),
)
SYSTEM = "You play tic-tac-toe. Rows are A to C, columns are 1 to 3. Answer with a free cell, like <move>B2</move>"

Game = tuple[str, ...]
"""The cells in the order in which they were taken; x begins."""


def show(game: Game) -> str:
    """The user turn: the board, and whose move it is."""
    held = {cell: "xo"[index % 2] for index, cell in enumerate(game)}
    rows = (" ".join(f"{row}{c} {held.get(row + c, '_')}" for c in "123") for row in "ABC")
    return "\n".join(rows) + f"\nYou are {'xo'[len(game) % 2]}."


def parse_move(answer: str, game: Game) -> str | None:
    """The free cell that an answer names; None for any other answer."""
    match = re.fullmatch(r"<move>([ABC][123])</move>", answer.strip())
    return match[1] if match and match[1] in free_cells(game) else None


def free_cells(game: Game) -> list[str]:
    return [cell for cell in CELLS if cell not in game]


def is_over(game: Game) -> bool:
    return _has_line(game[0::2]) or _has_line(game[1::2]) or len(game) == len(CELLS)


def score(game: Game, symbol: str, is_illegal: bool) -> float:
    """The reward of a game, 0 to 1: the mean worth of the positions that `symbol` moved to.

    An illegal answer ends the game and counts as a position worth nothing.
    """
    first = "xo".index(symbol)
    worths = [
        position_value(frozenset(game[0:end:2]), frozenset(game[1:end:2]), symbol)
        for end in range(first + 1, len(game) + 1, 2)
    ]
    if is_illegal:
        worths.append(0.0)
    return sum(worths) / len(worths)


@functools.cache
def position_value(x: frozenset[str], o: frozenset[str], symbol: str) -> float:
    """What `symbol` can expect if both sides go on at random: 1 a win, 0.5 a draw, 0 a loss."""
    mine, theirs = (x, o) if symbol == "x" else (o, x)
    if _has_line(mine):
        return 1.0
    if _has_line(theirs):
        return 0.0
    free = [cell for cell in CELLS if cell not in x | o]
    if not free:
        return 0.5
    if len(x) == len(o):
        values = [position_value(x | {cell}, o, symbol) for cell in free]
    else:
        values = [position_value(x, o | {cell}, symbol) for cell in free]
    return sum(values) / len(values)


def _has_line(cells: Sequence[str] | frozenset[str]) -> bool:
    return any(set(line) <= set(cells) for line in LINES)
