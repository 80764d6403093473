"""An agent of AgentScope, which streams."""

import task
from agentscope.agent import Agent, ReActConfig
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

import art

ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="allowed")


async def run_agent(r: art.Rollout, question: str) -> str:
    model = OpenAIChatModel(
        OpenAICredential(api_key=r.api_key, base_url=r.base_url),
        r.model.get_inference_name(),
        OpenAIChatModel.Parameters(max_tokens=task.MAX_TOKENS),
    )
    agent = Agent(
        "agent",
        "You call tools.",
        model,
        Toolkit([FunctionTool(function, permission=ALLOWED) for function in task.TOOLS]),
        react_config=ReActConfig(max_iters=task.MAX_TURNS),
    )
    return (await agent.reply(UserMsg("user", question))).get_text_content() or ""
