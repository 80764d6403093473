"""An agent of AG2."""

import task
from ag2 import Agent
from ag2.config import OpenAIConfig

import art


async def run_agent(r: art.Rollout, question: str) -> str:
    config = OpenAIConfig(
        r.model.get_inference_name(), base_url=r.base_url, api_key=r.api_key, max_tokens=task.MAX_TOKENS
    )
    return (await Agent("agent", config=config, tools=task.TOOLS).ask(question)).body or ""
