"""An agent with tools, for the example programs: the model calls tools until it answers in words."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import art

Call = Callable[[str, dict[str, Any]], Awaitable[str]]
"""Calls the tool of a name with arguments as JSON has them (hence Any). Returns the text that the model reads."""
MAX_TURNS = 4


def tool(name: str, description: str, **parameters: dict[str, Any]) -> art.types.Tool:
    """A tool as an entry of a request's `tools`; `parameters` are JSON schemas by name, all of them required."""
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    function: Any = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def functions(**known: Callable[..., str]) -> Call:
    """A call that runs the known function of the requested name. An unknown name or argument becomes a message for the model."""

    async def call(name: str, arguments: dict[str, Any]) -> str:
        try:
            return known[name](**arguments)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            return f"Error: {error}"

    return call


async def use_tools(
    model: art.TrainableModel, trajectory: art.Trajectory, call: Call, *, logprobs: bool = False
) -> str:
    """Adds the model's tool calls, their results and its answer to the trajectory, whose `tools` are offered. Returns
    the answer's text; empty if the model still calls tools in its turn MAX_TURNS. `logprobs`: choices carry their tokens
    and log-probabilities."""
    for _ in range(MAX_TURNS):
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            tools=trajectory.tools or [],
            max_tokens=64,
            logprobs=logprobs,
            # By default Qwen3 thinks at length. Templates without this switch ignore it.
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        calls = choice.message.tool_calls or []
        if not calls:
            return choice.message.content or ""
        for tool_call in calls:
            result = await _result(call, tool_call.function) if tool_call.type == "function" else "Error"
            trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})
    return ""


async def _result(call: Call, function: Any) -> str:  # Any: openai's record of a call
    try:
        arguments = json.loads(function.arguments)
    except json.JSONDecodeError as error:
        return f"Error: the arguments are no JSON: {error}"
    if not isinstance(arguments, Mapping):
        return "Error: the arguments are no JSON object"
    return await call(function.name, dict(arguments))
