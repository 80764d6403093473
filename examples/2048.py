"""2048: ten moves from a board of six tiles. Half of the reward is for the score, the sum of the tiles made by merging.
The other half is for having the largest tile in the lower left corner, where it does not block other tiles.

The games of a group begin on the same board and draw new tiles with the same random seed. A move that changes nothing
is lost. An answer that is not a move ends the game with a reward of 0. Random moves score about 47 points and bring the
largest tile into that corner in 7% of the games. Random moves to the left and down score 45 points, and do so in 78%.

    python examples/2048.py [--model art/tiny] [--steps 30] [--server http://127.0.0.1:7623]
"""

import argparse
import asyncio
import itertools
import random

from program import (
    VAL_EVERY,
    ask,
    flag_parser,
    make_backend,
    make_model,
    plot,
    report,
    train_config,
)

import art

SYSTEM = (
    "You play 2048. Keep the largest tile in the lower left corner. "
    "Answer with left, right, up or down, like <move>left</move>"
)
MOVE = r"<move>(left|right|up|down)</move>"
NUM_MOVES = 10
NUM_FIRST_TILES = 6
FULL_SCORE = 80
"""The score with the full reward. Games of ten moves hardly ever reach it."""
VALIDATION_SEEDS = [f"validation {number}" for number in range(32)]
"""Seeds of games that are not trained."""

Board = list[list[int]]
"""Four rows of four tiles, 0 for none."""


def merge_row(row: list[int]) -> tuple[list[int], int]:
    """The row after its tiles slide to the left, and the points of the merges. A tile merges at most once:
    `[2, 2, 4, 0] -> [4, 4, 0, 0], 4`."""
    tiles = [tile for tile in row if tile]
    merged: list[int] = []
    points = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            points += tile
        merged.append(tile)
    return merged + [0] * (len(row) - len(merged)), points


def slide(board: Board, direction: str) -> tuple[Board, int]:
    """The board after a move, without the new tile, and the points of the move's merges."""
    is_vertical, is_backward = direction in ("up", "down"), direction in ("right", "down")
    lines = transpose(board) if is_vertical else board
    moved = [merge_row(line[::-1] if is_backward else line) for line in lines]
    rows = [line[::-1] if is_backward else line for line, _ in moved]
    return transpose(rows) if is_vertical else rows, sum(points for _, points in moved)


def transpose(board: Board) -> Board:
    return [list(column) for column in zip(*board, strict=True)]


def add_tile(board: Board, rng: random.Random) -> None:
    """Puts a 2, or with a probability of 0.1 a 4, on a free cell."""
    cells = itertools.product(range(4), range(4))
    row, column = rng.choice([(row, column) for row, column in cells if not board[row][column]])
    board[row][column] = 4 if rng.random() < 0.1 else 2


def board_text(board: Board) -> str:
    """Four lines such as "2|4|_|_"."""
    return "\n".join("|".join(str(tile or "_") for tile in row) for row in board)


async def rollout(model: art.TrainableModel, seed: str) -> art.Trajectory:
    """A game of NUM_MOVES moves. The seed determines the first board and the new tiles."""
    rng = random.Random(seed)
    board: Board = [[0] * 4 for _ in range(4)]
    for _ in range(NUM_FIRST_TILES):
        add_tile(board, rng)
    game = art.Trajectory(messages_and_choices=[{"role": "system", "content": SYSTEM}])
    score, num_lost_moves, is_malformed = 0, 0, False
    for _ in range(NUM_MOVES):
        direction = await ask(model, game, board_text(board), MOVE)
        if not direction:
            is_malformed = True
            break
        moved, points = slide(board, direction)
        score += points
        if moved == board:
            num_lost_moves += 1
            continue
        add_tile(moved, rng)
        board = moved
    is_in_corner = board[-1][0] == max(map(max, board))
    if is_malformed:
        game.reward = 0.0
    else:
        for_corner = 1.0 if is_in_corner else 0.0
        game.reward = (min(1.0, score / FULL_SCORE) + for_corner) / 2
    game.metrics = {
        "score": score,
        "in_corner": is_in_corner,
        "lost_moves": num_lost_moves,
        "malformed": is_malformed,
    }
    return game


async def train(model: art.TrainableModel, first_step: int, flags: argparse.Namespace) -> list[float]:
    """Trains up to step `--steps`. Returns the mean reward before each step."""
    rewards: list[float] = []
    for step in range(first_step, flags.steps):
        seeds = [f"{step} {number}" for number in range(flags.groups)]
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, seed) for _ in range(flags.group_size)) for seed in seeds),
            pbar_desc="games",
        )
        result = await model.train(groups, config=train_config(flags))
        rewards.append(report(result, "2048", ("score", "in_corner", "lost_moves", "malformed")))
        if result.step % VAL_EVERY == 0:
            print(await art.evaluate(model, rollout, VALIDATION_SEEDS))
    return rewards


async def main() -> None:
    flags = flag_parser("2048, ten moves.", 4, {"art/tiny": 2e-3, "smollm2": 2e-4}).parse_args()
    model = make_model(flags, "2048")
    async with make_backend(flags) as backend:
        await model.register(backend)
        first_step = await model.get_step()
        rewards = await train(model, first_step, flags)
    if rewards:
        plot({"reward": rewards}, flags.plot, "2048", first_step)


if __name__ == "__main__":
    asyncio.run(main())
