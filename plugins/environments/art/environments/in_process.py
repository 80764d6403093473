"""A harness for verifiers that runs in the program's own process: a chat loop with the task's tools, and no subprocess."""

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import HarnessError
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime

__all__ = ["InProcessHarness"]


class InProcessConfig(vf.HarnessConfig):
    """The settings that every harness has."""


class InProcessHarness(vf.Harness[InProcessConfig]):
    """Asks the model until the model answers without a tool call. A full context ends the rollout, without an error."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    # verifiers would warn of a harness in the subprocess runtime whose model runs code on this machine.
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace[Any, Any, Any],
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(_to_interception(secret))
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while (message := await _ask(client, endpoint, body, trace)) is not None:
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    content = await _call(connections, names, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                if not message.get("tool_calls"):
                    break
        return ProgramResult(0, "", "")


def _to_interception(secret: str) -> httpx.AsyncClient:
    """A client for the server in this process by which verifiers watches a rollout. The client needs no TLS and no proxies."""
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.AsyncClient(headers=headers, timeout=None, verify=False, trust_env=False)


async def _ask(
    client: httpx.AsyncClient, endpoint: str, body: dict[str, Any], trace: vf.Trace[Any, Any, Any]
) -> dict[str, Any] | None:
    """The model's message; None if the rollout is over, because the task stopped it or the context is full."""
    reply = await client.post(f"{endpoint.rstrip('/')}/chat/completions", json=body)
    if reply.is_success:
        message = reply.json()["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}
    text = reply.text
    if trace.stop_condition is not None or (
        reply.status_code in (400, 413) and any(marker in text.casefold() for marker in CONTEXT_OVERFLOW_MARKERS)
    ):
        return None
    raise HarnessError(f"the model's server answered {reply.status_code}: {text[-2000:]}")


async def _call(connections: Any, names: Any, function: dict[str, str]) -> Any:
    """A tool's result, or a text about what is wrong with the call, so that the model can correct the call."""
    name, text = function["name"], function["arguments"] or "{}"
    try:
        arguments = json.loads(text)
    except ValueError as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    if name not in names:
        return f"error: there is no tool {name!r}"
    return await call_mcp(connections, names, name, arguments)
