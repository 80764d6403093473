"""An agent of Strands."""

import task
from strands import Agent, tool
from strands.models.openai import OpenAIModel

import art

TOOLS = [tool(function) for function in task.TOOLS]


async def run_agent(r: art.Rollout, question: str) -> str:
    model = OpenAIModel(
        client_args={"base_url": r.base_url, "api_key": r.api_key},
        model_id=r.model.get_inference_name(),
        params={"max_tokens": task.MAX_TOKENS},
    )
    return str(await Agent(model=model, tools=TOOLS, callback_handler=None).invoke_async(question))
