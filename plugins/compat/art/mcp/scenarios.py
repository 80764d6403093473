"""`generate_scenarios`: a model invents tasks for the tools and resources of an MCP server."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from art.errors import ArtError
from art.mcp.types import GeneratedScenario, GeneratedScenarioCollection, MCPResource, MCPTool
from art.scopes import no_capture
from art_compat.aliases import alias
from art_compat.models import Model
from art_protocol.display import Short

logger = logging.getLogger(__name__)

OPENROUTER_URL = "https://openrouter.ai/api/v1"
MAX_REQUESTS = 4
"""Requests in a row without a new scenario, after which generation ends with an error."""
MAX_TOKENS = 8_000

KindT = TypeVar("KindT", MCPTool, MCPResource)

PROMPT = """\
Invent tasks for an AI agent that is connected to an MCP server.

Tools of the server:
{tools}

Resources of the server:
{resources}

Invent {number} tasks that a user could really give to this agent.
- The tools and resources above are enough to complete each task.
- A task says what the user wants. It does not name the tools to use.
- The tasks differ in purpose and in the tools that they need.
- Some need one or two tool calls, others several that build on each other.
- Each task asks for a report at the end: what was done, and what follows from the results.
- The difficulty is 1 for one tool call, and 5 for many steps with an analysis.
{done}
Answer with one JSON object: {{"scenarios": [{{"task": "...", "difficulty": 3}}]}}"""


async def generate_scenarios(
    tools: Iterable[Any],
    resources: Iterable[Any] | None = (),
    num_scenarios: int = 24,
    show_preview: bool = True,
    custom_instructions: str | None = None,
    generator_model: str = "openai/gpt-4.1-mini",
    generator_api_key: str | None = None,
    generator_base_url: str = OPENROUTER_URL,
) -> GeneratedScenarioCollection:
    """Asks a model for tasks until there are `num_scenarios` different tasks.

    `tools` and `resources` are `MCPTool` and `MCPResource`, dictionaries, or the objects of MCP's client. The model can
    be any at an OpenAI-compatible address. The key defaults to OPENROUTER_API_KEY at OpenRouter, else to OPENAI_API_KEY.

    Raises:
        ValueError: there is neither a tool nor a resource, or the number is below 1.
        ArtError: the model does not answer, or gives no new scenario in four answers.
    """
    known_tools = [_to_record(tool, MCPTool) for tool in tools]
    known_resources = [_to_record(resource, MCPResource) for resource in resources or ()]
    if not known_tools and not known_resources:
        raise ValueError("generate_scenarios needs at least one tool or resource")
    if num_scenarios < 1:
        raise ValueError(f"num_scenarios is at least 1, not {num_scenarios}")
    is_router = generator_base_url.rstrip("/") == OPENROUTER_URL
    variable = "OPENROUTER_API_KEY" if is_router else "OPENAI_API_KEY"
    model = Model(name="generator", project="mcp", inference_model_name=generator_model)
    model.inference_base_url = generator_base_url
    model.inference_api_key = generator_api_key or os.environ.get(variable) or "default"
    instructions = [f"- {custom_instructions}"] if custom_instructions else []
    texts = {"tools": _to_text(known_tools), "resources": _to_text(known_resources)}
    try:
        with no_capture():
            scenarios = await _collect(model, texts, instructions, num_scenarios)
    finally:
        await model.close()
    logger.info("%d scenarios from '%s'", len(scenarios), generator_model)
    if show_preview:
        scenarios.print_difficulty_distribution()
        scenarios.preview()
    return scenarios


def preview_scenarios(scenarios: Iterable[Any], n: int = 5) -> None:
    """Prints the first `n` scenarios, which may be dictionaries."""
    records = [
        scenario if isinstance(scenario, GeneratedScenario) else GeneratedScenario.from_dict(scenario)
        for scenario in scenarios
    ]
    GeneratedScenarioCollection(records).preview(n)


async def _collect(
    model: Model, texts: dict[str, str], instructions: list[str], number: int
) -> GeneratedScenarioCollection:
    """Asks until there are enough different scenarios.

    Raises:
        ArtError: the model does not answer, or not with new scenarios.
    """
    scenarios: dict[str, GeneratedScenario] = {}  # by task
    num_empty, problem = 0, ""
    while len(scenarios) < number:
        known = "\n".join(f"  {task}" for task in scenarios)
        done = "\n".join([*instructions, *([f"- Do not repeat these:\n{known}"] if scenarios else [])])
        before = len(scenarios)
        text = await _ask(model, PROMPT.format(number=number - before, done=done, **texts))
        try:
            scenarios |= {scenario.task: scenario for scenario in _read(text)}
        except ValueError as error:
            problem = f": {error}"
        num_empty = num_empty + 1 if len(scenarios) == before else 0
        if num_empty == MAX_REQUESTS:
            raise ArtError(
                f"'{model.inference_model_name}' gave {before} of {number} scenarios and no new one in "
                f"{MAX_REQUESTS} answers{problem}. Use a stronger generator_model, or ask for fewer scenarios"
            )
    return GeneratedScenarioCollection(list(scenarios.values())[:number])


def _to_record(value: Any, kind: type[KindT]) -> KindT:
    """A tool or resource in our form. The records of MCP's client are pydantic models."""
    if isinstance(value, kind):
        return value
    if hasattr(value, "model_dump"):
        value = value.model_dump(by_alias=True)
    if not isinstance(value, Mapping):
        raise TypeError(f"a {kind.__name__} or a dictionary is needed, not {Short(value)!r}")
    return kind.from_dict(cast(Mapping[str, Any], value))


def _to_text(records: Iterable[MCPTool | MCPResource]) -> str:
    return json.dumps([record.to_dict() for record in records], indent=1) if records else "none"


async def _ask(model: Model, prompt: str) -> str:
    """The text of the answer, in the schema of scenarios where the endpoint accepts a schema.

    Raises:
        ArtError: there is no answer.
    """
    from openai import APIStatusError, OpenAIError  # imported here, because the import takes a second

    scenario = {
        "task": {"type": "string"},
        "difficulty": {"type": "integer", "enum": [*range(1, 6)]},
    }
    schema = _object({"scenarios": {"type": "array", "items": _object(scenario)}})
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "scenarios", "strict": True, "schema": schema},
    }
    create: Any = model.openai_client().with_options(max_retries=2).chat.completions.create
    request = {
        "model": model.inference_model_name,
        "messages": [{"role": "user", "content": prompt}],
        # OpenAI's o-series refuses the older name, `max_tokens`.
        "max_completion_tokens": MAX_TOKENS,
    }
    try:
        try:
            completion = await create(**request, response_format=form)
        except APIStatusError as error:
            if error.status_code not in (400, 422):
                raise
            completion = await create(**request)  # an endpoint without schemas
    except OpenAIError as error:
        raise ArtError(
            f"'{model.inference_model_name}' at {model.inference_base_url} does not answer: {type(error).__name__}"
        ) from None  # the text of the error's cause can contain the key
    return (completion.choices[0].message.content if completion.choices else None) or ""


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    # OpenAI's strict schemas have both in each object.
    strict = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **strict}


def _read(text: str) -> list[GeneratedScenario]:
    """The valid scenarios of an answer.

    Raises:
        ValueError: the answer contains no JSON object with "scenarios".
    """
    start, end = text.find("{"), text.rfind("}")
    try:
        data = json.loads(text[start : end + 1])
    except RecursionError as error:
        raise ValueError("the answer nests too deeply") from error
    scenarios = list[GeneratedScenario]()
    entries: Any = data.get("scenarios") or []
    if not isinstance(entries, list):
        raise ValueError(f'"scenarios" is no list: {entries!r:.200}')
    for entry in cast("list[Any]", entries):
        try:
            scenario = GeneratedScenario.from_dict(entry)
        except (KeyError, TypeError, ValueError):
            continue
        if scenario.task.strip():
            scenarios.append(scenario)
    return scenarios


alias(__name__, "art.mcp.generate_scenarios")
