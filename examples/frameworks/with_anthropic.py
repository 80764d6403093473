"""Train an agent written with plain `anthropic`, which speaks to `/v1/messages`."""

import asyncio

import task
from anthropic import AsyncAnthropic

import art

TOOLS = [{"name": s["name"], "description": s["description"], "input_schema": s["parameters"]} for s in task.SCHEMAS]


async def run_agent(r: art.Rollout, question: str) -> str:
    async with AsyncAnthropic(base_url=r.root_url, api_key=r.api_key) as client:
        messages = [{"role": "user", "content": question}]
        for _ in range(task.MAX_TURNS):
            message = await client.messages.create(
                model=r.model.get_inference_name(),
                messages=messages,
                tools=TOOLS,
                max_tokens=task.MAX_TOKENS,
            )
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in message.content if block.type == "text")
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": task.call_tool(call.name, call.input),
                }
                for call in calls
            ]
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results},
            ]
        return ""


if __name__ == "__main__":
    asyncio.run(task.train("anthropic", run_agent))
