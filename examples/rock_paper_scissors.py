"""Rock, paper, scissors with a tool: the agent calls `play(kind)` against an opponent who likes rock.

A game has three rounds, each with a tool call, its result and a remark of the agent. The reward is the mean of the
rounds: 1 for a win, 0.5 for a draw, 0 for a loss or a round without a valid move. The games of a group have the same
moves of the opponent. The prompt says stone for rock, a word that art/tiny knows, and names the moves in random order.
For a real model change `--model`; the learning rate then becomes 1e-4.

    python examples/rock_paper_scissors.py [--model art/tiny] [--steps 15] [--server http://127.0.0.1:7623]
"""

import asyncio
import random

from learning import learn, learner_parser
from tool_agent import functions, tool, use_tools

import art

BEATS = {"stone": "scissors", "paper": "stone", "scissors": "paper"}
BIAS = {"stone": 0.7, "paper": 0.15, "scissors": 0.15}
"""How often the opponent plays each move. Always paper earns 0.775 on average, random moves earn 0.5."""
NUM_ROUNDS = 3
LEARNING_RATES = {"art/tiny": 1e-3}
TOOLS = [tool("play", "Play a round.", kind={"type": "string", "enum": list(BEATS)})]


async def rollout(model: art.TrainableModel, seed: str, *, logprobs: bool = False) -> art.Trajectory:
    """A game of NUM_ROUNDS rounds. The seed determines the opponent's moves."""
    rng = random.Random(seed)
    opponent = rng.choices(list(BIAS), list(BIAS.values()), k=NUM_ROUNDS)
    game = art.Trajectory(messages_and_choices=[], tools=TOOLS)
    points = [0.0] * NUM_ROUNDS
    moves: list[str] = []
    for number in range(NUM_ROUNDS):

        def play(kind: str, number: int = number) -> str:
            if len(moves) > number:
                return "Error: this round is over"
            if kind not in BEATS:
                return f"Error: no move {kind}"
            moves.append(kind)
            other = opponent[number]
            points[number] = 0.5 if kind == other else float(BEATS[kind] == other)
            return f"{other}, you {('lose', 'draw', 'win')[int(2 * points[number])]}"

        options = " or ".join(f"kind={kind}" for kind in rng.sample(list(BEATS), len(BEATS)))
        game.messages_and_choices.append({"role": "user", "content": f"Play a round: {options}"})
        await use_tools(model, game, functions(play=play), logprobs=logprobs)
        if len(moves) <= number:
            moves.append("none")
    game.reward = sum(points) / NUM_ROUNDS
    game.metrics = {move: moves.count(move) / NUM_ROUNDS for move in (*BEATS, "none")}
    return game


if __name__ == "__main__":
    parser = learner_parser("Rock, paper, scissors with a tool.", 4, LEARNING_RATES, steps=15)
    names = (*BEATS, "none")
    asyncio.run(learn(parser.parse_args(), "rock-paper-scissors", rollout, str, names))
