"""Tic-tac-toe and 2048 as chats: the prompts, the boards, and games played at random.

The measurement and any user of the model build their prompts with `tictactoe_system`,
`tictactoe_turn`, `game_2048_system` and `game_2048_turn`; the model knows these wordings.
"""

import re

from tiny_model.words import Message, Rng, turns

CELLS = tuple(row + column for row in "ABC" for column in "123")
DIRECTIONS = ("left", "right", "up", "down")
Board = dict[str, str]
"""The taken cells of a tic-tac-toe board and their symbols: {"B2": "x"}."""

_LINES = (
    *(tuple(row + column for column in "123") for row in "ABC"),
    *(tuple(row + column for row in "ABC") for column in "123"),
    ("A1", "B2", "C3"),
    ("A3", "B2", "C1"),
)

_MOVE_FORMS = ("<move>B2</move>", "<row>B</row><col>2</col>")
_TICTACTOE_SYSTEMS = (
    "You play tic-tac-toe. Rows are A to C, columns are 1 to 3. Answer with a free cell, like {form}",
    "This is a game of tic-tac-toe on a 3 by 3 board. Pick an empty cell. Your answer looks like {form}",
    "You are a tic-tac-toe player. Try to win. Write your move as {form}",
    "tic-tac-toe: three in a line win. Choose a cell marked _ and write {form}",
)
_2048_SYSTEMS = (
    "You play 2048. Answer with left, right, up or down, like <move>left</move>",
    "This is the game 2048. Write your move as <move>left</move>, <move>right</move>, <move>up</move> or <move>down</move>",
    "You are a 2048 player. Choose a direction: <move>up</move>",
)


def tictactoe_system(variant: int = 0, rows_and_columns: bool = False) -> str:
    """The system prompt of a game; variant 0 is the one to use, 0 to 3 are known."""
    return _TICTACTOE_SYSTEMS[variant].format(form=_MOVE_FORMS[rows_and_columns])


def tictactoe_turn(board: Board, symbol: str) -> str:
    """The user turn that shows the board and asks for the move of `symbol`."""
    return f"{board_text(board)}\nYou are {symbol}."


def board_text(board: Board) -> str:
    """Writes the board as three lines such as "A1 _ A2 x A3 o": each cell's name, then the cell's symbol.

    With each cell's name beside it, the model reads the board as it copies text. A grid without names took several times
    as many steps to learn.
    """
    rows = (" ".join(f"{row}{column} {board.get(row + column, '_')}" for column in "123") for row in "ABC")
    return "\n".join(rows)


def move_text(cell: str, rows_and_columns: bool = False) -> str:
    """The assistant's answer for a cell."""
    if rows_and_columns:
        return f"<row>{cell[0]}</row><col>{cell[1]}</col>"
    return f"<move>{cell}</move>"


def parse_move(text: str) -> str | None:
    """The cell that an answer names in either form, or None."""
    match = re.fullmatch(r"<move>([ABC][123])</move>|<row>([ABC])</row><col>([123])</col>", text)
    return "".join(group for group in match.groups() if group) if match else None


def free_cells(board: Board) -> list[str]:
    """The cells that are not taken, row by row."""
    return [cell for cell in CELLS if cell not in board]


def winner(board: Board) -> str | None:
    """The symbol that holds a whole line, or None."""
    for first, second, third in _LINES:
        if first in board and board[first] == board.get(second) == board.get(third):
            return board[first]
    return None


def is_over(board: Board) -> bool:
    """Whether a line is full or no cell is free."""
    return winner(board) is not None or not free_cells(board)


def start_board(rng: Rng, symbol: str) -> Board:
    """The board before the first move of `symbol`: x begins, so o finds one random x."""
    return {} if symbol == "x" else {rng.choice(CELLS): "x"}


def play_randomly(rng: Rng, board: Board, symbol: str) -> None:
    """Puts `symbol` on a random free cell of the board."""
    board[rng.choice(free_cells(board))] = symbol


def tictactoe_chat(rng: Rng, thinking: bool) -> list[Message]:
    """A whole game at random as a conversation, or its last position alone when thinking."""
    symbol, other = rng.choice(("xo", "ox"))
    rows_and_columns = rng.random() < 0.2
    variant = rng.choice((0, 0, 0, 1, 2, 3))
    messages: list[Message] = [{"role": "system", "content": tictactoe_system(variant, rows_and_columns)}]
    board = start_board(rng, symbol)
    if rng.random() < 0.15:
        board = _later_board(rng, symbol)
    while not is_over(board):
        cells = free_cells(board)
        cell = rng.choice(cells)
        answer: Message = {"role": "assistant", "content": move_text(cell, rows_and_columns)}
        if thinking:
            answer["reasoning_content"] = f"Free: {', '.join(cells)}. I take {cell}."
        messages += [{"role": "user", "content": tictactoe_turn(board, symbol)}, answer]
        board[cell] = symbol
        if not is_over(board):
            play_randomly(rng, board, other)
        if thinking and rng.random() < 0.3:
            break
    return messages


def _later_board(rng: Rng, symbol: str) -> Board:
    """A board some random moves into a game, unfinished, with `symbol` to move."""
    other = "o" if symbol == "x" else "x"
    board = start_board(rng, symbol)
    for _ in range(rng.randint(1, 3)):
        later = dict(board)
        play_randomly(rng, later, symbol)
        play_randomly(rng, later, other)
        if is_over(later):
            break
        board = later
    return board


def board_questions(rng: Rng) -> list[Message]:
    """Questions about tic-tac-toe boards, which teach to read boards. Each question is about the last board."""
    messages: list[Message] = []
    board: Board = {}
    for number in range(rng.randint(2, 5)):
        shown = ""
        if number == 0 or rng.random() < 0.5:
            board = {cell: rng.choice("xo") for cell in rng.sample(CELLS, rng.randint(1, 8))}
            shown = board_text(board) + "\n"
        question, answer = _board_question(rng, board)
        messages += turns(shown + question, answer)
    return messages


def _board_question(rng: Rng, board: Board) -> tuple[str, str]:
    cell, symbol = rng.choice(CELLS), rng.choice("xo")
    free = free_cells(board)
    taken = [one for one in CELLS if board.get(one) == symbol]
    return rng.choice(
        (
            ("Which cells are free?", ", ".join(free)),
            ("Name a free cell.", rng.choice(free)),
            ("How many cells are free?", str(len(free))),
            (f"Which cells have {symbol}?", ", ".join(taken) or "none"),
            (f"What is at {cell}?", board.get(cell, "free")),
        )
    )


def game_2048_system(variant: int = 0) -> str:
    """The system prompt of 2048; variant 0 is the one to use, 0 to 2 are known."""
    return _2048_SYSTEMS[variant]


def game_2048_turn(rows: list[list[int]]) -> str:
    """The user turn that shows the board, 0 for an empty cell."""
    return "\n".join("|".join(str(value) if value else "_" for value in row) for row in rows)


def random_2048_board(rng: Rng) -> list[list[int]]:
    """A board of 4 by 4 with powers of two, about half of it empty."""
    largest = rng.randint(2, 9)
    return [[2 ** rng.randint(1, largest) if rng.random() < 0.5 else 0 for _ in range(4)] for _ in range(4)]


def game_2048_chat(rng: Rng, thinking: bool) -> list[Message]:
    """One to four turns of 2048 with random directions."""
    messages: list[Message] = [{"role": "system", "content": game_2048_system(rng.choice((0, 0, 1, 2)))}]
    for _ in range(rng.randint(1, 4)):
        direction = rng.choice(DIRECTIONS)
        answer: Message = {"role": "assistant", "content": f"<move>{direction}</move>"}
        if thinking:
            answer["reasoning_content"] = f"I go {direction}."
        messages += [{"role": "user", "content": game_2048_turn(random_2048_board(rng))}, answer]
    return messages
