"""Train an agent of smolagents, which is not asynchronous: it runs in a thread.

The agent ends with its first tool's result. For a model that calls smolagents' tool `final_answer`, which art/tiny does
not, leave PROMPT out and return the result of `agent.run(question)`.
"""

import asyncio

import task
from smolagents import ActionStep, LogLevel, OpenAIModel, ToolCallingAgent, tool

import art

PROMPT = "You call tools."
"""Replaces smolagents' own prompt, which is longer than art/tiny can read."""


def make_tool(function):
    function.__doc__ += "\n\nArgs:\n    city: The city."  # smolagents wants all arguments described
    return tool(function)


TOOLS = [make_tool(function) for function in task.TOOLS]


def first_result(agent: ToolCallingAgent, question: str) -> str:
    steps = agent.run(question, stream=True)
    return next((str(step.observations) for step in steps if isinstance(step, ActionStep)), "")


async def run_agent(r: art.Rollout, question: str) -> str:
    model = OpenAIModel(
        r.model.get_inference_name(),
        api_base=r.base_url,
        api_key=r.api_key,
        max_tokens=task.MAX_TOKENS,
    )
    agent = ToolCallingAgent(TOOLS, model, verbosity_level=LogLevel.OFF)
    agent.prompt_templates["system_prompt"] = PROMPT
    return await asyncio.to_thread(first_result, agent, question)


if __name__ == "__main__":
    asyncio.run(task.train("smolagents", run_agent))
