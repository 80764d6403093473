"""A choice's `art` field has what the request demanded of the answer, for people who read the answer."""

from typing import Any

import pytest

from art_server.inference_proxy import demands_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FORM = {"type": "json_schema", "name": "city", "strict": True}
BODIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tool_choice": "auto"}, {}),
    ({"tool_choice": {"type": "auto"}, "response_format": {"type": "text"}, "text": "plain"}, {}),
    ({"tool_choice": "required"}, {"tool_choice": "required"}),
    ({"response_format": {"type": "json_object"}}, {"format": {"type": "json_object"}}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}},
        {"format": FORM},
    ),
    ({"text": {"format": FORM | {"schema": SCHEMA}}}, {"format": FORM}),
    ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"format": {"type": "json_schema"}}),
]


@pytest.mark.parametrize(("body", "demands"), BODIES)
def test_tool_choice_and_format_are_shown_without_schemas(body: dict[str, Any], demands: dict[str, Any]) -> None:
    assert demands_of(body) == demands
