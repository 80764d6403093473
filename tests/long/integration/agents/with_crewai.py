"""A crew of CrewAI with one agent."""

import task
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import art

TOOLS = [tool(function.__name__)(function) for function in task.TOOLS]


async def run_agent(r: art.Rollout, question: str) -> str:
    llm = LLM(
        model=r.model.get_inference_name(),
        provider="openai",
        base_url=r.base_url,
        api_key=r.api_key,
        max_tokens=task.MAX_TOKENS,
    )
    agent = Agent(
        role="Guide", goal="Answer.", backstory="Knows cities.", tools=TOOLS, llm=llm, max_iter=task.MAX_TURNS
    )
    job = Task(description=question, expected_output="The result.", agent=agent)
    return str(await Crew(agents=[agent], tasks=[job]).kickoff_async())
