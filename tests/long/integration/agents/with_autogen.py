"""An agent of AutoGen."""

import task
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

import art

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)


async def run_agent(r: art.Rollout, question: str) -> str:
    client = OpenAIChatCompletionClient(
        model=r.model.get_inference_name(),
        base_url=r.base_url,
        api_key=r.api_key,
        model_info=INFO,
        max_tokens=task.MAX_TOKENS,
    )
    agent = AssistantAgent(
        "agent",
        client,
        tools=task.TOOLS,
        system_message=None,
        reflect_on_tool_use=True,
        max_tool_iterations=task.MAX_TURNS,
    )
    result = await agent.run(task=question)
    await client.close()
    return result.messages[-1].to_text()
