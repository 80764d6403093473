"""Tools as the engine's route for tokens takes them: without the fields that a table filled with null."""

from typing import Any

from art_server.jobs import reasons
from art_server.jobs.turns import UnusableTurn

Tools = list[dict[str, Any]]

DATA = frozenset({"default", "const", "enum", "examples"})
"""Fields of a JSON schema whose values are data, not schemas."""
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Fields of a JSON schema whose values map names to schemas."""
MAY_BE_NULL = frozenset({"default", "const"})
"""Fields of a JSON schema for which null is a value."""


def tools_for_engine(tools: Tools | None) -> Tools | None:
    """Tools in the route's form.

    Raises:
        UnusableTurn: an entry is no tool with a function.
    """
    if not tools:
        return None
    present = [{name: value for name, value in tool.items() if value is not None} for tool in tools]
    for index, tool in enumerate(present):
        if tool.get("type", "function") != "function":
            raise UnusableTurn(reasons.no_function(f"tools[{index}]", tool["type"]))
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            raise UnusableTurn(reasons.unnamed_function(f"tools[{index}]"))
    is_filled = any(map(_is_filled, schemas_by_name(present).values()))
    return [{**tool, "function": _function(tool["function"], is_filled)} for tool in present]


def schemas_by_name(tools: Tools) -> dict[str, Any]:
    """The schemas of the arguments of functions, by the functions' names."""
    functions = [tool.get("function") for tool in tools]
    return {
        function["name"]: function.get("parameters")
        for function in functions
        if isinstance(function, dict) and isinstance(function.get("name"), str)
    }


def _function(function: dict[str, Any], is_filled: bool) -> dict[str, Any]:
    present = {name: value for name, value in function.items() if value is not None}
    if isinstance(present.get("parameters"), dict):
        present["parameters"] = _schema(present["parameters"], is_filled)
    return present


def _is_filled(schema: Any) -> bool:
    """Whether a schema comes from a table: it has a null where no JSON schema can have one. Then every null stands for an
    absent field, also as a default."""
    if not isinstance(schema, dict):
        return False
    if any(value is None for name, value in schema.items() if name not in MAY_BE_NULL):
        return True
    return any(_is_filled(inner) or inner is None for inner in _inner_schemas(schema))


def _inner_schemas(schema: dict[str, Any]) -> list[Any]:
    inner: list[Any] = []
    for name, value in schema.items():
        if name in DATA:
            continue
        if isinstance(value, list):
            inner += [item for item in value if isinstance(item, dict)]
        elif isinstance(value, dict):
            inner += value.values() if name in BY_NAME else [value]
    return inner


def _schema(schema: dict[str, Any], is_filled: bool) -> dict[str, Any]:
    """A JSON schema without the nulls that a table filled in."""
    present: dict[str, Any] = {}
    for name, value in schema.items():
        if value is None:
            if name in MAY_BE_NULL and not is_filled:
                present[name] = value
        elif name in DATA:
            present[name] = value
        elif isinstance(value, list):
            present[name] = [_schema_or_value(item, is_filled) for item in value]
        elif isinstance(value, dict) and name in BY_NAME:
            named = {key: inner for key, inner in value.items() if inner is not None}
            present[name] = {key: _schema_or_value(inner, is_filled) for key, inner in named.items()}
        else:
            present[name] = _schema_or_value(value, is_filled)
    return present


def _schema_or_value(value: Any, is_filled: bool) -> Any:
    return _schema(value, is_filled) if isinstance(value, dict) else value
