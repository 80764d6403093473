"""An agent that is a loop around LiteLLM."""

import json

import litellm
import task

import art

TOOLS = [{"type": "function", "function": schema} for schema in task.SCHEMAS]


async def run_agent(r: art.Rollout, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    for _ in range(task.MAX_TURNS):
        completion = await litellm.acompletion(
            model=f"openai/{r.model.get_inference_name()}",
            base_url=r.base_url,
            api_key=r.api_key,
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
