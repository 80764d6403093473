"""A program of Instructor, which asks again for calls that it cannot read."""

from collections.abc import Iterable

import instructor
import task
from openai import AsyncOpenAI
from pydantic import create_model

import art

CALLS = [create_model(function.__name__, __doc__=function.__doc__, city=(str, ...)) for function in task.TOOLS]


async def run_agent(r: art.Rollout, question: str) -> str:
    async with AsyncOpenAI(base_url=r.base_url, api_key=r.api_key) as openai:
        client = instructor.from_openai(openai, mode=instructor.Mode.PARALLEL_TOOLS)
        calls = await client.chat.completions.create(
            model=r.model.get_inference_name(),
            messages=[{"role": "user", "content": question}],
            response_model=Iterable[CALLS[0] | CALLS[1] | CALLS[2]],
            max_tokens=task.MAX_TOKENS,
        )
        return " ".join(task.call_tool(type(call).__name__, call.model_dump()) for call in calls)
