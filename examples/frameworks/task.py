"""The task that every example of this folder trains on: questions that need a tool, and the loop that trains.

An example brings one function, `run_agent`, in which its framework does what it always does. It is told where the
model is by an `art.Rollout`; what it asked there is the trajectory. Where the server is, ART_SERVER_URL says.
"""

import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import art

RunAgent = Callable[[art.Rollout, str], Awaitable[str]]
"""Answers a question, with the model at the rollout's address."""

NUM_STEPS, NUM_QUESTIONS, GROUP_SIZE = 2, 4, 8

MAX_TOKENS = 64
"""More than any good answer needs; a model that rambles is stopped here."""

MAX_TURNS = 4
"""For the agents that are loops of our own."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    sky = ("sunny", "cloudy", "windy", "foggy")[len(city) % 4]
    return f"{sky}, {sum(map(ord, city)) % 30} degrees"


TOOLS: list[Callable[..., int | str]] = [add, get_weather]

SCHEMAS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
    {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
]
"""The tools as JSON schema, for the clients that want it written out; frameworks make it from the functions."""


def call_tool(name: str, arguments: dict[str, object]) -> str:
    """A tool's result, or what went wrong, as the model reads it."""
    tools = {tool.__name__: tool for tool in TOOLS}
    try:
        return str(tools[name](**arguments))
    except (KeyError, TypeError) as error:
        return f"Error: {error}"


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    result: str
    """What the right tool returns for the question's arguments."""


def make_question(rng: random.Random) -> Question:
    if rng.random() < 0.5:
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        return Question(f"What is {a} plus {b}?", call_tool("add", {"a": a, "b": b}))
    city = rng.choice(["Paris", "London", "Berlin", "Madrid", "Rome", "Tokyo"])
    return Question(f"What is the weather in {city}?", call_tool("get_weather", {"city": city}))


def score(question: Question, answer: str) -> float:
    """1 for an answer that holds the tool's result, a little less the more words it takes."""
    return float(question.result in answer) - 0.01 * len(answer.split())


async def train(name: str, run_agent: RunAgent) -> None:
    """Trains the agent for a few steps, and prints a line of JSON about each."""
    model = art.TrainableModel(name=name, project="frameworks", base_model="art/tiny")
    rng = random.Random(1)

    async def run(question: Question) -> art.Trajectory:
        async with art.rollout(model) as r:
            answer = await run_agent(r, question.text)
            return await r.trajectory(reward=score(question, answer))

    async with art.Backend() as backend:
        await model.register(backend)
        for _ in range(NUM_STEPS):
            questions = [make_question(rng) for _ in range(NUM_QUESTIONS)]
            groups = await art.gather_trajectory_groups(
                (art.TrajectoryGroup(run(q) for _ in range(GROUP_SIZE)) for q in questions),
                max_exceptions=0.5,  # an agent may run out of turns
                max_concurrent_rollouts=8,
            )
            result = await model.train(groups, config=art.TrainConfig(learning_rate=1e-3))
            print(
                json.dumps(
                    {
                        "step": result.step,
                        "reward": result.metrics["train/reward"],
                        "report": result.report.model_dump(),
                    }
                )
            )
