"""Puzzles of who, where and when: a plan shows who was in which room at which hour, and the agent is asked about it.

The plan has the rows A to C for hours, the columns 1 to 3 for rooms, and two suspects, x and o; _ is nobody. The agent
says in which cell x was, which is where and when, and then who was in a given cell. The reward is the share of right
answers to who, where and when. art/tiny can read this form; the program draws the puzzles itself.
`examples/temporal_clue.ipynb` has the same steps as a notebook. For a real model change `--model` and the texts of
`draw_puzzle`; the learning rate then becomes 1e-4.

    python examples/temporal_clue.py [--model art/tiny] [--steps 20] [--server http://127.0.0.1:7623]
"""

import asyncio
import random
from dataclasses import dataclass

from learning import learn, learner_parser
from program import ask

import art

HOURS, ROOMS = "ABC", "123"
WHERE = "Which cells have x?"
WHO = "What is at {}?"


@dataclass(frozen=True, slots=True)
class Puzzle:
    plan: dict[str, str]
    """Who is in each cell: x, o or _."""
    asked: str
    """The cell that the question WHO asks about."""

    @property
    def text(self) -> str:
        """Three lines such as "A1 _ A2 x A3 o"."""
        rows = (" ".join(f"{hour}{room} {self.plan[hour + room]}" for room in ROOMS) for hour in HOURS)
        return "\n".join(rows)


def draw_puzzle(seed: str) -> Puzzle:
    """A plan with x in one cell and o in two to four."""
    rng = random.Random(seed)
    cells = [hour + room for hour in HOURS for room in ROOMS]
    taken = rng.sample(cells, rng.randint(3, 5))
    plan = dict.fromkeys(cells, "_") | dict.fromkeys(taken, "o") | {taken[0]: "x"}
    who = rng.choice("xo_")
    return Puzzle(plan, rng.choice([cell for cell in cells if plan[cell] == who]))


async def rollout(model: art.TrainableModel, puzzle: Puzzle) -> art.Trajectory:
    dialogue = art.Trajectory(messages_and_choices=[])
    cell = await ask(model, dialogue, f"{puzzle.text}\n{WHERE}", r"^([ABC][123])$")
    who = await ask(model, dialogue, WHO.format(puzzle.asked), r"^(\w+)$")
    right = (
        {"when": False, "where": False}
        if not cell
        else {
            "when": any(puzzle.plan[cell[0] + room] == "x" for room in ROOMS),
            "where": any(puzzle.plan[hour + cell[1]] == "x" for hour in HOURS),
        }
    )
    right["who"] = who.replace("free", "_") == puzzle.plan[puzzle.asked]
    dialogue.reward = sum(right.values()) / len(right)
    dialogue.metrics = {**right}
    return dialogue


if __name__ == "__main__":
    flags = learner_parser("Who, where and when.", 8, {"art/tiny": 2e-3}, steps=20).parse_args()
    names = ("who", "where", "when")
    asyncio.run(learn(flags, "temporal-clue", rollout, draw_puzzle, names))
