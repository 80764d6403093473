"""ART's `art.guided_completion`: parameters that make a student repeat a teacher's answer, for distillation.

    choice, tool_choice, tools = get_guided_completion_params(answer_of_the_teacher, base_tools)

A text answer becomes the only permitted choice, for `extra_body={"structured_outputs": {"choice": choice}}`. A tool call
becomes the tool with a schema that permits only these arguments.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion


def freeze_tool_schema(tool: Mapping[str, Any], fixed_args: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tool whose parameters permit only these arguments."""
    frozen = copy.deepcopy(dict(tool))
    frozen["function"]["parameters"] = {
        "type": "object",
        "properties": {name: {"enum": [value]} for name, value in fixed_args.items()},
        "required": list(fixed_args),
        "additionalProperties": False,
    }
    return frozen


def get_guided_completion_params(
    completion: "ChatCompletion", base_tools: Iterable[Mapping[str, Any]] | None = None
) -> tuple[list[str] | None, dict[str, Any] | None, list[dict[str, Any]] | None]:
    """The choice, `tool_choice` and `tools` that repeat the first choice of an answer: its first tool call, or else its text.

    Raises:
        ValueError: the tool that the answer calls is not in `base_tools`.
    """
    message: Any = completion.choices[0].message
    if not message.tool_calls:
        return [message.content or ""], None, None
    function = message.tool_calls[0].function
    tools = {tool["function"]["name"]: tool for tool in base_tools or ()}
    if function.name not in tools:
        raise ValueError(f"the answer calls '{function.name}'; base_tools has {sorted(tools)}")
    tool_choice: dict[str, Any] = {"type": "function", "function": {"name": function.name}}
    frozen = freeze_tool_schema(tools[function.name], json.loads(function.arguments))
    return None, tool_choice, [frozen]
