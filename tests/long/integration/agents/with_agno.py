"""An agent of Agno."""

import task
from agno.agent import Agent
from agno.models.openai.like import OpenAILike

import art


async def run_agent(r: art.Rollout, question: str) -> str:
    model = OpenAILike(
        id=r.model.get_inference_name(), base_url=r.base_url, api_key=r.api_key, max_tokens=task.MAX_TOKENS
    )
    agent = Agent(model=model, tools=task.TOOLS, telemetry=False, tool_call_limit=task.MAX_TURNS)
    return str((await agent.arun(question)).content)
