"""Train an agent written with plain `openai`."""

import asyncio
import json

import task
from openai import AsyncOpenAI

import art

TOOLS = [{"type": "function", "function": schema} for schema in task.SCHEMAS]
CLIENT = AsyncOpenAI(api_key="of the rollout")
"""One client for all rollouts: each client opens connections of its own."""


async def run_agent(r: art.Rollout, question: str) -> str:
    client = CLIENT.with_options(base_url=r.base_url, api_key=r.api_key)  # on the same connections
    messages = [{"role": "user", "content": question}]
    for _ in range(task.MAX_TURNS):
        completion = await client.chat.completions.create(
            model=r.model.get_inference_name(),
            messages=messages,
            tools=TOOLS,
            max_tokens=task.MAX_TOKENS,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = task.call_tool(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    asyncio.run(task.train("openai", run_agent))
