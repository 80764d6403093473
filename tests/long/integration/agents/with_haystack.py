"""An agent of Haystack."""

from typing import Annotated

import task
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

import art


def make_tool(function):
    def wrapped(city: Annotated[str, "The city."]) -> str:
        return function(city)

    return create_tool_from_function(wrapped, name=function.__name__, description=function.__doc__)


async def run_agent(r: art.Rollout, question: str) -> str:
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token(r.api_key),
        model=r.model.get_inference_name(),
        api_base_url=r.base_url,
        generation_kwargs={"max_tokens": task.MAX_TOKENS},
    )
    agent = Agent(
        chat_generator=generator, tools=[make_tool(tool) for tool in task.TOOLS], max_agent_steps=task.MAX_TURNS
    )
    answer = await agent.run_async(messages=[ChatMessage.from_user(question)])
    return answer["last_message"].text or ""
