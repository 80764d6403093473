"""An agent of LangChain's create_agent, which streams."""

import task
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import art


async def run_agent(r: art.Rollout, question: str) -> str:
    model = ChatOpenAI(
        model=r.model.get_inference_name(),
        base_url=r.base_url,
        api_key=r.api_key,
        max_tokens=task.MAX_TOKENS,
        streaming=True,
    )
    agent = create_agent(model, tools=task.TOOLS)
    state = await agent.ainvoke({"messages": [{"role": "user", "content": question}]}, {"recursion_limit": 8})
    return state["messages"][-1].text
