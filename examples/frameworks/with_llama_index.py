"""Train a LlamaIndex agent, whose requests stream."""

import asyncio

import task
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

import art


async def run_agent(r: art.Rollout, question: str) -> str:
    llm = OpenAILike(
        model=r.model.get_inference_name(),
        api_base=r.base_url,
        api_key=r.api_key,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=1.0,  # its own default, 0.1, leaves little to explore
        max_tokens=task.MAX_TOKENS,
    )
    agent = FunctionAgent(llm=llm, tools=task.TOOLS)
    return str(await agent.run(question))


if __name__ == "__main__":
    asyncio.run(task.train("llama-index", run_agent))
