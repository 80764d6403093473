"""An agent whose tools come from an MCP server, which this file also serves over stdio.

The program starts the server as a child process, lists its tools, offers them to the model, and sends the model's calls
to the server. The reward is 1 for an answer with the number that the server returned for the right arguments. The
program needs the package `mcp`, which the server's extra installs with vLLM. For a real model change `--model`; for
another MCP server change SERVER, the scenarios and their answers.

    python examples/mcp_tools.py [--model art/tiny] [--steps 16] [--server http://127.0.0.1:7623]
"""

import asyncio
import sys
from functools import partial
from typing import Any

import mcp
from cities import TOOLS, Question, draw_question
from learning import learn, learner_parser
from mcp.server.mcpserver import MCPServer
from tool_agent import use_tools

import art

SERVER = mcp.StdioServerParameters(command=sys.executable, args=[__file__, "--serve"])

world = MCPServer("world", log_level="WARNING")


for function in TOOLS:
    world.add_tool(function)


def to_tools(listed: mcp.types.ListToolsResult) -> art.types.Tools:
    """MCP's tools as entries of a chat request."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in listed.tools
    ]


async def rollout(client: mcp.Client, model: art.TrainableModel, question: Question) -> art.Trajectory:
    async def call(name: str, arguments: dict[str, Any]) -> str:
        result = await client.call_tool(name, arguments)
        return "\n".join(block.text for block in result.content if block.type == "text")

    dialogue = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": question.text}],
        tools=to_tools(await client.list_tools()),
    )
    answer = await use_tools(model, dialogue, call)
    dialogue.reward = float(question.answer in answer)
    return dialogue


async def main() -> None:
    parser = learner_parser("An agent with MCP's tools.", 12, {"art/tiny": 1e-3}, steps=16)
    flags = parser.parse_args()
    async with mcp.Client(mcp.stdio_client(SERVER)) as client:
        await learn(flags, "mcp-tools", partial(rollout, client), draw_question)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        world.run()
    else:
        asyncio.run(main())
