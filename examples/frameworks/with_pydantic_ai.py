"""Train a Pydantic AI agent."""

import asyncio

import task
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import art


async def run_agent(r: art.Rollout, question: str) -> str:
    model = OpenAIChatModel(
        r.model.get_inference_name(),
        provider=OpenAIProvider(base_url=r.base_url, api_key=r.api_key),
    )
    agent = Agent(model, tools=task.TOOLS, model_settings={"max_tokens": task.MAX_TOKENS})
    result = await agent.run(question)
    return result.output


if __name__ == "__main__":
    asyncio.run(task.train("pydantic-ai", run_agent))
