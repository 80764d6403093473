"""Train an agent of the OpenAI Agents SDK, which speaks to `/v1/responses`."""

import asyncio

import task
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool

import art


async def run_agent(r: art.Rollout, question: str) -> str:
    agent = Agent(
        name="assistant",
        model=r.model.get_inference_name(),
        model_settings=ModelSettings(max_tokens=task.MAX_TOKENS),
        tools=[function_tool(tool) for tool in task.TOOLS],
    )
    provider = OpenAIProvider(base_url=r.base_url, api_key=r.api_key)
    config = RunConfig(model_provider=provider, tracing_disabled=True)
    result = await Runner.run(agent, question, run_config=config)
    return str(result.final_output)


if __name__ == "__main__":
    asyncio.run(task.train("openai-agents", run_agent))
