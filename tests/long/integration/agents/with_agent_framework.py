"""An agent of Microsoft's agent-framework."""

import task
from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

import art


async def run_agent(r: art.Rollout, question: str) -> str:
    client = OpenAIChatCompletionClient(model=r.model.get_inference_name(), base_url=r.base_url, api_key=r.api_key)
    agent = Agent(client=client, tools=task.TOOLS, default_options={"max_tokens": task.MAX_TOKENS})
    return (await agent.run(question)).text
