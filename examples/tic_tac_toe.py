"""Tic-tac-toe: a game of several turns, against a random player or between two models that both learn.

All games of a group start from the same opening board. Half of a game's reward is for its result. The other half is for
moves that keep the value of their board, so that good moves count even if the game is lost by chance.

    python examples/tic_tac_toe.py [--self-play] [--model art/tiny] [--steps 30] [--server http://127.0.0.1:7623]
"""

import argparse
import asyncio
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
from tic_tac_toe_rules import after_move, board_text, free_cells, random_opening, result, to_move, value

import art

SYSTEM = "You play tic-tac-toe. Rows are A to C, columns are 1 to 3. Answer with a free cell, like <move>B2</move>"
MOVE = r"<move>([ABC][123])</move>"


async def play(opening: str, players: dict[str, art.TrainableModel]) -> dict[str, art.Trajectory]:
    """Plays one game; symbols without a player move at random. Returns the trajectories of players that moved.

    An illegal move ends the game: the player gets a reward of 0, and the opponent wins. A network error is raised.
    """
    sides = {symbol: art.Trajectory(messages_and_choices=[{"role": "system", "content": SYSTEM}]) for symbol in players}
    given_away = dict.fromkeys(players, 0.0)
    board, offender = opening, None
    while result(board, "x") is None:
        symbol, free = to_move(board), free_cells(board)
        if symbol not in players:
            board = after_move(board, random.choice(free))
            continue
        question = f"{board_text(board)}\nYou are {symbol}."
        cell = await ask(players[symbol], sides[symbol], question, MOVE)
        if cell not in free:
            offender = symbol
            break
        given_away[symbol] += value(board, symbol)
        board = after_move(board, cell)
        given_away[symbol] -= value(board, symbol)
    for symbol, side in sides.items():
        end = float(symbol != offender) if offender else result(board, symbol) or 0.0
        is_illegal = symbol == offender
        side.reward = 0.0 if is_illegal else (end + max(0.0, 1 - given_away[symbol])) / 2
        side.metrics = {
            "won": end == 1,
            "drawn": end == 0.5,
            "illegal": is_illegal,
            "given_away": given_away[symbol],
        }
    return {symbol: side for symbol, side in sides.items() if len(side.messages_and_choices) > 1}


async def rollout(model: art.TrainableModel, opening: str) -> art.Trajectory:
    """A game against a random player. The model plays the side whose turn it is on the opening board."""
    symbol = to_move(opening)
    return (await play(opening, {symbol: model}))[symbol]


def draw_openings(rng: random.Random, num_openings: int) -> list[str]:
    """Boards with x and o to move in turn. A third are at the start of a game, the others two or four moves later."""
    return [random_opening(rng, i % 2 + rng.choice((0, 2, 4))) for i in range(num_openings)]


async def play_a_random_player(
    model: art.TrainableModel, openings: list[str], group_size: int
) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(model, board) for _ in range(group_size)) for board in openings),
        pbar_desc="games",
    )


async def play_each_other(
    models: dict[str, art.TrainableModel], openings: list[str], group_size: int
) -> dict[str, list[art.TrajectoryGroup]]:
    """The groups of each side, without the groups in which the side never moved. For the side that moves second, the games of a
    group have different first boards."""
    rounds = await asyncio.gather(
        *(asyncio.gather(*(play(board, models) for _ in range(group_size))) for board in openings)
    )
    groups: dict[str, list[art.TrajectoryGroup]] = {side: [] for side in models}
    for side, side_groups in groups.items():
        for games in rounds:
            trajectories = [game[side] for game in games if side in game]
            if trajectories:
                side_groups.append(art.TrajectoryGroup(trajectories))
    return groups


async def train(
    models: dict[str, art.TrainableModel], first_step: int, flags: argparse.Namespace
) -> dict[str, list[float]]:
    """Trains "x" and "o", or "both sides" with one model. Returns the mean rewards before each step."""
    rewards: dict[str, list[float]] = {side: [] for side in models}
    validation = draw_openings(random.Random("validation"), 32)
    for step in range(first_step, flags.steps):
        openings = draw_openings(random.Random(step), flags.groups)
        if flags.self_play:
            played = await play_each_other(models, openings, flags.group_size)
        else:
            games = await play_a_random_player(models["both sides"], openings, flags.group_size)
            played = {"both sides": games}
        for side, groups in played.items():
            trained = await models[side].train(groups, config=train_config(flags))
            rewards[side].append(report(trained, side, ("won", "illegal", "given_away")))
            if trained.step % VAL_EVERY == 0:
                boards = [board for board in validation if side in ("both sides", to_move(board))]
                print(await art.evaluate(models[side], rollout, boards))
    return rewards


async def main() -> None:
    parser = flag_parser("Tic-tac-toe against a random player, or self-play.", 8, {"art/tiny": 4e-3, "smollm2": 2e-4})
    parser.add_argument("--self-play", action="store_true", help="train two models on their games")
    flags = parser.parse_args()
    sides = {"x": "-x", "o": "-o"} if flags.self_play else {"both sides": ""}
    models = {side: make_model(flags, "tic-tac-toe", end) for side, end in sides.items()}
    async with make_backend(flags) as backend:
        for model in models.values():
            await model.register(backend)
        first_step = min([await model.get_step() for model in models.values()])
        rewards = await train(models, first_step, flags)
    if any(rewards.values()):
        plot(rewards, flags.plot, "tic-tac-toe", first_step)


if __name__ == "__main__":
    asyncio.run(main())
