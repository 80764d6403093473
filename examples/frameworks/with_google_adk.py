"""Train an agent of Google's Agent Development Kit, through its LiteLLM connector."""

import asyncio

import task
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

import art


async def run_agent(r: art.Rollout, question: str) -> str:
    llm = LiteLlm(
        model=f"openai/{r.model.get_inference_name()}",
        api_base=r.base_url,
        api_key=r.api_key,
        max_tokens=task.MAX_TOKENS,
    )
    agent = LlmAgent(name="assistant", model=llm, tools=task.TOOLS)
    runner = InMemoryRunner(agent, app_name="example")
    session = await runner.session_service.create_session(app_name="example", user_id="user")
    message = types.UserContent(question)
    answer = ""
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
        if event.is_final_response() and event.content and event.content.parts:
            answer = "".join(part.text or "" for part in event.content.parts)
    return answer


if __name__ == "__main__":
    asyncio.run(task.train("google-adk", run_agent))
