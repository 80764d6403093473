"""Tasks of reasoning-gym, which checks their answers: syllogisms, answered with yes or no.

`--generator` names any of reasoning-gym's hundred generators, `--config` has the generator's settings as JSON, and
`--prompt` the form of the question. The held-out tasks have other seeds. art/tiny learns the form and the more frequent
answer here, not logic. The program needs pip install '.[environments]'. For a real model
change `--model`, `--generator` and `--prompt`; the learning rate then becomes 1e-4.

    python examples/reasoning.py [--generator syllogism] [--model art/tiny] [--steps 12]
"""

import argparse
import asyncio
import json
import zlib
from functools import partial

from learning import learn, learner_parser
from program import ask

import art
from art.environments import ReasoningTask, reasoning_gym

PROMPT = "{question} answer with yes or no"


def draw_task(flags: argparse.Namespace, seed: str) -> ReasoningTask:
    number = zlib.crc32(seed.encode())
    (task,) = reasoning_gym(flags.generator, size=1, seed=number, prompt=flags.prompt, **flags.config)
    return task


async def rollout(model: art.TrainableModel, task: ReasoningTask) -> art.Trajectory:
    dialogue = art.Trajectory(messages_and_choices=[])
    answer = await ask(model, dialogue, task.question, r"(?s)(.+)")
    # The right answers begin with a capital, art/tiny's words do not.
    dialogue.reward = max(task.score(answer), task.score(answer.capitalize()))
    dialogue.metrics = {"solved": dialogue.reward == 1}
    return dialogue


def main() -> None:
    parser = learner_parser("Tasks of reasoning-gym.", 8, {"art/tiny": 1e-3}, steps=12)
    parser.add_argument("--generator", default="syllogism")
    parser.add_argument("--config", type=json.loads, default={}, help="its settings, as JSON")
    parser.add_argument("--prompt", default=PROMPT, help="a text with {question}")
    flags = parser.parse_args()
    asyncio.run(learn(flags, "reasoning", rollout, partial(draw_task, flags), ("solved",)))


if __name__ == "__main__":
    main()
