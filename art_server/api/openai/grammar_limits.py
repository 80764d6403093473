"""What constrains sampling (schemas, regular expressions, grammars, choices, tools): limits, options, names in errors.

vLLM compiles constraints in the engine's process (xgrammar 0.2.8), which samples nothing meanwhile. The time grows with the
third power of some sizes. Within these limits the slowest input that we found takes about two seconds on one core.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from art_server.api.bodies import is_deeper
from art_server.errors import BadRequest, InvalidInput
from art_server.shared import engine_messages as samples

FIELDS = ("response_format", "structured_outputs", "tools", "text", "output_config")
"""Fields with constraints in the four APIs (`text.format` of /v1/responses, `output_config.format` of /v1/messages)."""
MAX_BYTES = 64 * 1024
"""Bytes of a field, or of the schema of one tool."""
MAX_TOOLS, MAX_TOOLS_BYTES = 128, 256 * 1024
MAX_DEPTH = 32
MAX_MEMBERS, MAX_ITEMS = 128, 1024
"""Members of one object, and items of one list. 800 optional properties take five seconds to compile, 2,000 take minutes."""
MAX_TEXT = 256
"""Characters of a name or any other text."""
LITERALS = frozenset({"choice", "enum", "const"})
MAX_LONG_LITERALS, MAX_LONG_LITERAL = 8, 2048
"""The number of choices and constants above `MAX_TEXT` characters, and the characters of each, if there are several. A single
long literal is limited by MAX_BYTES only: 60,000 characters compile in half a second. Two long literals with the same beginning
take a minute."""
MAX_LENGTHS = {"regex": 512, "pattern": 512, "whitespace_pattern": 512, "grammar": 2048}
"""Characters of a text that is parsed as an expression: 600 times `"a"?` take ten seconds to compile."""
PROSE = frozenset({"description", "title", "default", "examples", "$comment"})
"""Members whose texts do not constrain sampling."""
JSON_PATHS = frozenset({"structured_outputs.json", "structured_outputs.structural_tag"})
"""Fields whose text may contain JSON."""


GRAMMAR_MARK = samples.GRAMMAR_MARK.encode()

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Members of `structured_outputs` that vLLM obeys."""
REMOVED = ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")
"""vLLM's former fields `guided_...`, which vLLM ignores."""


OWN = {
    "chat": ("response_format", "structured_outputs"),
    "completions": ("response_format", "structured_outputs"),
    "responses": ("text.format", "structured_outputs"),
    "messages": ("output_config.format",),
}
"""The constraints that vLLM obeys, by API. In one API vLLM ignores the constraints of the other APIs."""
EVERY = {"output_format"}.union(*OWN.values())
"""The constraints of all APIs, and one of an earlier API of Anthropic, which vLLM does not know."""


def check_grammars(api: str, body: dict[str, Any]) -> None:
    """Checks the constraints of a request.

    Raises:
        BadRequest: vLLM would ignore an option, or a field has the wrong type.
        InvalidInput: a field is above a limit.
    """
    check_options(api, body)
    for field in FIELDS:
        if body.get(field) is not None:
            check_field(field, msgspec.json.encode(body[field]))


def check_options(api: str, body: dict[str, Any]) -> None:
    """Checks that vLLM would ignore no option: the answer would not be what the request demands."""
    for name, kind, what in (("structured_outputs", dict, "an object"), ("tools", list, "a list")):
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise BadRequest(f"{name}: it must be {what}", code="invalid_body", param=name)
    for name in REMOVED:
        if body.get(f"guided_{name}") is not None:
            raise ignored_option(f"guided_{name}", "use `structured_outputs` or `response_format` instead")
    for path in sorted(EVERY.difference(OWN[api])):
        if value_at(body, path) is not None:
            raise ignored_option(path, f"use {' or '.join(OWN[api])} instead")
    for name, value in (body.get("structured_outputs") or {}).items():
        if name not in CONSTRAINTS and value not in (None, False):
            known = ", ".join(CONSTRAINTS)
            raise ignored_option(f"structured_outputs.{name[:MAX_TEXT]}", f"it knows {known}")


def value_at(body: Mapping[str, Any], path: str) -> Any:
    """The value of a field, or of a field's member such as "text.format"; None if the body has no such field."""
    field, _, member = path.partition(".")
    value = body.get(field)
    if not member:
        return value
    return value.get(member) if isinstance(value, dict) else None


def ignored_option(path: str, remedy: str) -> BadRequest:
    return BadRequest(
        f"{path}: the engine does not know this option in a request and would ignore it; {remedy}",
        code="unknown_option",
        param=path,
    )


def name_grammar(content: bytes, body: Mapping[str, Any]) -> bytes:
    """vLLM's refusal of a request. If a grammar is the reason, the refusal names the request's field with the grammar."""
    if GRAMMAR_MARK not in content:
        return content
    field = grammar_field(body)
    answer = msgspec.json.decode(content)
    error = answer["error"]
    error["message"] = error["message"].replace(samples.GRAMMAR_MARK, field)
    error["param"] = field
    return msgspec.json.encode(answer)


def grammar_field(body: Mapping[str, Any]) -> str:
    """The field of a request that contains the grammar, such as "response_format.json_schema"."""
    options = body.get("structured_outputs")
    if isinstance(options, dict):
        for name in CONSTRAINTS:
            if options.get(name) is not None:
                return f"structured_outputs.{name}"
    for path in ("text.format", "output_config.format"):
        if value_at(body, path) is not None:
            return path
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") not in (None, "text"):
        return "response_format" + (".json_schema" if wanted.get("json_schema") else "")
    tools = body.get("tools")
    if not isinstance(tools, list):
        return "the request"
    return " or ".join(tool_schemas(tools, body.get("tool_choice"))) or "tools"


def tool_schemas(tools: list[Any], choice: Any) -> list[str]:
    """The paths of the schemas of tools, such as "tools[0].parameters": of the tools that a `tool_choice` names, or of all tools if
    it names none."""
    chosen: list[str] = []
    every: list[str] = []
    for index, tool in enumerate(tools):
        for member, schema in schemas_of(tool):
            if schema is None:
                continue
            path = f"tools[{index}].{member}"
            every.append(path)
            name = str(tool.get("name") or (tool.get("function") or {}).get("name"))
            if json_text(name) in json_text(choice):
                chosen.append(path)
    return chosen or every


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


@functools.lru_cache(maxsize=128)
def check_field(field: str, text: bytes) -> None:
    """Checks one field. Cached, because an agent sends the same tools with each request."""
    value = msgspec.json.decode(text)
    literals: list[tuple[str, int]] = []
    if field != "tools" or not isinstance(value, list):
        check_document(field, value, literals)
    else:
        check_number(field, "tools", len(value), MAX_TOOLS)
        check_number(field, "bytes", len(text), MAX_TOOLS_BYTES)
        for index, tool in enumerate(value):
            for member, schema in schemas_of(tool):
                check_document(f"tools[{index}].{member}", schema, literals)
    if len(literals) > 1:
        for path, length in literals:
            check_number(path, "characters", length, MAX_LONG_LITERAL)
        what = f"choices and constants above {MAX_TEXT} characters"
        check_number(field, what, len(literals), MAX_LONG_LITERALS)


def schemas_of(tool: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a tool that can become a grammar, in any of the APIs. The rest is text for the model."""
    if isinstance(tool, dict):
        for name in ("parameters", "input_schema"):
            yield name, tool.get(name)
        if isinstance(function := tool.get("function"), dict):
            yield "function.parameters", function.get("parameters")


def check_document(path: str, value: Any, literals: list[tuple[str, int]]) -> None:
    """Checks a schema or a field. Adds the paths and lengths of long literals to `literals`."""
    check_number(path, "bytes", len(msgspec.json.encode(value)), MAX_BYTES)
    if is_deeper(value, MAX_DEPTH):
        raise grammar_too_large(path, f"objects and arrays nest more than {MAX_DEPTH} times")
    check_value(path, path, value, literals)


def check_value(path: str, name: str, value: Any, literals: list[tuple[str, int]]) -> None:
    """Checks the value of the member `name`, or an item of a list there, and all values inside it."""
    if isinstance(value, dict):
        check_number(path, "members", len(value), MAX_MEMBERS)
        for key, inner in value.items():
            check_number(path, "characters in a name", len(key), MAX_TEXT)
            check_value(f"{path}.{key}", key, inner, literals)
    elif isinstance(value, list):
        check_number(path, "items", len(value), MAX_ITEMS)
        for index, inner in enumerate(value):
            check_value(f"{path}[{index}]", name, inner, literals)
    elif isinstance(value, str) and path in JSON_PATHS:
        check_json(path, value, literals)
    elif isinstance(value, str) and name in LITERALS:
        if len(value) > MAX_TEXT:
            literals.append((path, len(value)))
    elif isinstance(value, str) and name not in PROSE:
        check_number(path, "characters", len(value), MAX_LENGTHS.get(name, MAX_TEXT))


def check_json(path: str, text: str, literals: list[tuple[str, int]]) -> None:
    check_number(path, "characters", len(text), MAX_BYTES)
    try:
        value = msgspec.json.decode(text)
    except RecursionError as error:
        raise grammar_too_large(path, f"objects and arrays nest more than {MAX_DEPTH} times") from error
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}", code="invalid_body", param=path) from error
    check_document(path, value, literals)


def check_number(path: str, what: str, number: int, limit: int) -> None:
    if number > limit:
        raise grammar_too_large(path, f"{number} {what} are above the limit of {limit}")


def grammar_too_large(path: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{path[:MAX_TEXT]}: {reason}; such a grammar could stall the engine: make it smaller",
        code="grammar_too_large",
        param=path[:MAX_TEXT],
    )
