"""What constrains sampling is bounded, whichever API it comes by."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from art_server.api.error_responses import status_of
from art_server.api.openai import grammar_limits
from art_server.api.openai.grammar_limits import name_grammar
from art_server.errors import BadRequest, InvalidInput
from art_server.shared import engine_messages as samples
from tests.asgi_client import client
from tests.quick.api.idle_server import make

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "prose " * 2000, "pattern": "[a-z ]{1,40}"},
        "days": {"type": "array", "items": {"enum": ["today", "tomorrow"]}, "maxItems": 14},
    },
    "required": ["city"],
}


def places(schema: Any) -> list[dict[str, Any]]:
    """A request with the schema for each place that vLLM takes one in."""
    named = {"name": "s", "schema": schema}
    function = {"name": "f", "description": "prose " * 2000, "parameters": schema}
    structures = [{"begin": "<f>", "schema": schema, "end": "</f>"}]
    return [
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"response_format": {"type": "structural_tag", "structures": structures, "triggers": []}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"structured_outputs": {"structural_tag": json.dumps({"structures": structures})}},
        {"text": {"format": {"type": "json_schema", **named}}},
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"tools": [{"type": "function", "function": function}]},
        {"tools": [{"type": "function", **function}]},
        {"tools": [{"name": "f", "input_schema": schema}]},
    ]


def check(body: dict[str, Any]) -> None:
    """Checks a request to the API that knows its first field."""
    apis = {"text": "responses", "output_config": "messages"}
    grammar_limits.check_grammars(apis.get(next(iter(body)), "chat"), body)


def nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"not": value}
    return value


@pytest.mark.parametrize("body", places(SCHEMA))
def test_usual_schemas_pass(body: dict[str, Any]) -> None:
    check(body)


HOSTILE = {
    "depth": nested(40),
    "members": {"type": "object", "properties": {f"p{i}": {} for i in range(200)}},
    "items": {"enum": list(range(2000))},
    "constants": {"anyOf": [{"const": "x" * 60_000}, {"const": "x" * 300}]},
    "many constants": {"enum": ["x" * length for length in range(300, 312)]},
    "pattern": {"type": "string", "pattern": "(ab?)*" * 100},
    "name": {"type": "object", "properties": {"x" * 300: {}}},
    "size": {"anyOf": [{"$comment": "x" * 1000} for _ in range(70)]},
    "hidden in prose": {"description": {"$id": "x" * 300}},
}
LONG = {
    "one": {"const": "x" * 60_000},
    "one of a list": {"enum": ["y" * 30_000, "x" * 256]},
    "several": {"properties": {name: {"enum": [name * 2000]} for name in "abcdefgh"}},
}


@pytest.mark.parametrize("name", LONG)
def test_a_few_long_texts_can_be_demanded(name: str) -> None:
    for body in places(LONG[name]):
        check(body)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_at_every_place(name: str) -> None:
    for body in places(HOSTILE[name]):
        with pytest.raises(InvalidInput) as error:
            check(body)
        (field,) = body
        assert error.value.param is not None and error.value.param.startswith(field)
        assert len(error.value.message) < 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "a?" * 300),
        ("grammar", "root ::= " + '"a"? ' * 600),
        ("choice", ["y" * 3000, "n" * 300]),
        ("choice", [str(number) for number in range(2000)]),
        ("whitespace_pattern", " ?" * 300),
        ("json", "[" * 50_000),
        ("json", '{"const": NaN, "$id": "' + "x" * 300 + '"}'),
    ],
)
def test_structured_outputs_are_bounded_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as error:
        check({"structured_outputs": {field: value}})
    assert str(error.value.param).startswith(f"structured_outputs.{field}")


@pytest.mark.anyio
async def test_the_gate_refuses_them_by_name(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    body = {"model": "run", "messages": [], "structured_outputs": {"regex": "a?" * 300}}
    async with client(app) as http:
        response = await http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (422, "structured_outputs.regex")
    assert error["code"] == "grammar_too_large"


def test_many_tools_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    check({"tools": [tool] * 20})
    for tools in ([{}] * 129, [tool] * 30):
        with pytest.raises(InvalidInput) as error:
            check({"tools": tools})
        assert (error.value.code, error.value.param) == ("grammar_too_large", "tools")


@given(
    st.sampled_from([field for field in grammar_limits.FIELDS if field != "structured_outputs"]),
    st.recursive(
        st.none() | st.integers(-9, 9) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ),
    st.integers(0, 60),
)
def test_small_values_pass_and_deep_ones_do_not(field: str, value: Any, depth: int) -> None:
    assume(field != "tools" or value is None or isinstance(value, list))
    check({field: value})
    for _ in range(depth):
        value = {"schema": value}
    if depth > grammar_limits.MAX_DEPTH:
        with pytest.raises(InvalidInput) as error:
            check({"response_format": value})
        assert (error.value.code, error.value.param) == ("grammar_too_large", "response_format")


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"guided_json": {}}, "guided_json"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"regex": "a", "backend": "outlines"}},
            "structured_outputs.backend",
        ),
    ],
)
def test_options_that_the_engine_would_ignore_are_refused(body: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as error:
        check(body)
    assert (error.value.code, error.value.param) == ("unknown_option", path)
    assert status_of(error.value) == 400


@pytest.mark.parametrize(
    ("api", "path"),
    [(api, path) for api, own in grammar_limits.OWN.items() for path in sorted(grammar_limits.EVERY - {*own})],
)
def test_constraints_of_another_api_are_refused(api: str, path: str) -> None:
    """vLLM would ignore them, and the answer would be free."""
    field, _, member = path.partition(".")
    wanted = {"type": "json_schema", "schema": SCHEMA}
    with pytest.raises(BadRequest) as error:
        grammar_limits.check_grammars(api, {field: {member: wanted} if member else wanted})
    assert (error.value.code, error.value.param) == ("unknown_option", path)
    assert status_of(error.value) == 400
    grammar_limits.check_grammars(api, {field: {"verbosity": "low"} if member else None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("structured_outputs", value) for value in ("x", 5, True, ["a"])),
        *(("tools", value) for value in (5, True, {"name": "f"})),
    ],
)
def test_fields_of_another_type_are_named(field: str, value: Any) -> None:
    """vLLM would answer 500: its validators call a dictionary's methods."""
    with pytest.raises(BadRequest) as error:
        check({field: value})
    assert (error.value.code, error.value.param) == ("invalid_body", field)
    assert status_of(error.value) == 400


def test_options_at_their_defaults_pass() -> None:
    options = {"json": {}, "disable_any_whitespace": False, "whitespace_pattern": None}
    check({"structured_outputs": options, "guided_json": None})


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"structured_outputs": {"grammar": "x", "json": None}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"output_config": {"format": {"schema": {}}}}, "output_config.format"),
        ({"tools": TOOLS[:1], "tool_choice": "required"}, "tools[0].function.parameters"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tools[1].function.parameters",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            "tools[0].function.parameters or tools[1].function.parameters",
        ),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools[0].input_schema"),
        ({"tools": None}, "the request"),
    ],
)
def test_a_refused_grammar_is_named_by_its_field(body: dict[str, Any], field: str) -> None:
    error = {"message": f"{samples.GRAMMAR_MARK}: the parenthesis is not closed", "code": 400}
    named = json.loads(name_grammar(json.dumps({"error": error}).encode(), body))
    assert named["error"]["message"] == f"{field}: the parenthesis is not closed"
    assert named["error"]["param"] == field
    other = b'{"error": {"message": "max_tokens is too large"}}'
    assert name_grammar(other, body) == other
