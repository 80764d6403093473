"""The task of this folder's examples: questions that need a tool (`examples/cities.py`), and the loop that trains.

An example brings one function, `run_agent`, with the usual code of its framework. An `art.Rollout` has the model's
address; the requests to this address become the trajectory. The server is at --server or ART_SERVER_URL.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the examples' shared modules

from cities import TOOLS as TOOLS
from cities import Question as Question
from cities import draw_question as draw_question
from learning import learn, learner_parser

import art

RunAgent = Callable[[art.Rollout, str], Awaitable[str]]
"""Answers a question, with the model at the rollout's address."""

MAX_TOKENS = 64
"""More than any good answer needs; a model that rambles is stopped here."""

MAX_TURNS = 4
"""The most calls of the model in an example that is a plain loop, such as `with_openai.py`."""

SCHEMAS = [
    {
        "name": tool.__name__,
        "description": tool.__doc__,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
    for tool in TOOLS
]
"""The tools as JSON schemas, for clients that need schemas. Frameworks make the schemas from the functions."""


def call_tool(name: str, arguments: dict[str, str]) -> str:
    """A tool's result or its error, as a text for the model."""
    tools = {tool.__name__: tool for tool in TOOLS}
    try:
        return tools[name](**arguments)
    except (KeyError, TypeError) as error:
        return f"Error: {error}"


def score(question: Question, answer: str) -> float:
    """1 for an answer with the tool's result."""
    return float(question.answer in answer)


async def train(name: str, run_agent: RunAgent) -> None:
    """Trains the agent, and compares it with step 0 on questions about other cities."""
    parser = learner_parser(f"An agent of {name}.", 12, {"art/tiny": 1e-3}, steps=16)
    # Frameworks raise an exception when a tool's arguments are wrong again and again, or turns run out.
    parser.set_defaults(server=os.environ.get("ART_SERVER_URL", "http://127.0.0.1:7623"), max_exceptions=0.5)

    async def rollout(model: art.TrainableModel, question: Question) -> art.Trajectory:
        async with art.rollout(model) as r:
            answer = await run_agent(r, question.text)
            return await r.trajectory(reward=score(question, answer))

    await learn(parser.parse_args(), name, rollout, draw_question)
