"""A judge as the reward: RULER scores the sentences of a group by a rubric, and GRPO trains on the scores.

The judge compares the answers of a group, so no right answer is needed. Without `--judge` the judge is a function that
looks for words about the weather, so that the program needs no second model. With `--judge` a language model at
`--judge-url`, an OpenAI-compatible address, reads the rubric. The held-out measure is the share of sentences with a
word about the weather. For a real model change `--model` and `--judge`; the learning rate then becomes 1e-4.

    python examples/judged.py [--judge NAME --judge-url URL] [--model art/tiny] [--steps 12]
"""

import argparse
import asyncio
import json
import random
import re
from typing import Any

from learning import compare, gather, learner_parser
from program import ask, make_backend, make_model, plot, report, train_config

import art
from art.rewards import Judge, ruler_score_group

RUBRIC = "A sentence about the weather scores 1, any other text scores 0."
WEATHER = re.compile(r"\b(sun|rain|raining|snow|ice|cold|wind|weather)\b")
PROMPTS = ("Tell me something.", "Write a sentence.")
HELD_OUT = "Tell me a story."
TRAJECTORY = re.compile(r'<trajectory id="(\d+)">\n(.*?)\n</trajectory>', re.DOTALL)


async def look_for_words(messages: list[dict[str, Any]]) -> str:
    """The scores of a judge's request, as a language model would write them."""
    trajectories = TRAJECTORY.findall(messages[-1]["content"])
    texts = {number: json.loads(text)[-1]["content"] for number, text in trajectories}
    return json.dumps(
        {
            "scores": {
                number: {"explanation": "by its words", "score": float(is_weather(text))}
                for number, text in texts.items()
            }
        }
    )


def is_weather(text: str) -> bool:
    return WEATHER.search(text.lower()) is not None


def draw_prompt(seed: str) -> str:
    return HELD_OUT if seed.startswith("held out") else random.Random(seed).choice(PROMPTS)


async def rollout(model: art.TrainableModel, prompt: str) -> art.Trajectory:
    """A sentence. The reward is the held-out measure; in training the judge's score replaces this reward."""
    trajectory = art.Trajectory(messages_and_choices=[])
    sentence = await ask(model, trajectory, prompt, r"(?s)(.+)")
    trajectory.reward = float(is_weather(sentence))
    return trajectory


async def train(model: art.TrainableModel, judge: Judge, flags: argparse.Namespace) -> list[float]:
    """Trains up to step `--steps`. Returns the judge's mean score before each step."""

    async def score(group: art.TrajectoryGroup) -> art.TrajectoryGroup | None:
        return await ruler_score_group(group, judge, rubric=RUBRIC, swallow_exceptions=True)

    rewards: list[float] = []
    for step in range(await model.get_step(), flags.steps):
        groups = await gather(model, flags, rollout, draw_prompt, step, after_each=score)
        result = await model.train(groups, config=train_config(flags))
        rewards.append(report(result, model.name, ("ruler_score", "independent_reward")))
    return rewards


async def main() -> None:
    parser = learner_parser("A judge as the reward.", 4, {"art/tiny": 1e-3}, steps=12)
    parser.add_argument("--judge", help="name of a language model (default: a function)")
    parser.add_argument("--judge-url", help="its OpenAI-compatible address")
    flags = parser.parse_args()
    judge = Judge(flags.judge, base_url=flags.judge_url) if flags.judge else Judge(look_for_words)
    model = make_model(flags, "judged")
    async with make_backend(flags) as backend:
        await model.register(backend)
        first_step = await model.get_step()
        rewards = await train(model, judge, flags)
        await compare(model, flags, rollout, draw_prompt)
    if rewards:
        plot({"judge's score": rewards}, flags.plot, "a judge as the reward", first_step)


if __name__ == "__main__":
    asyncio.run(main())
