"""The JSON schema of a file, for editors: with the meaning of each field, `base:`, and `${VAR}` in place of any value.

A file may take any part of a section from its `base:`. Only a file without `base:` has required sections.
"""

import ast
import inspect
import itertools
import textwrap
from typing import Any, cast

from pydantic import BaseModel

import art
from art.finetune import sections

VARIABLE = {"type": "string", "pattern": r"\$\{[A-Za-z_]\w*(:-[^}]*)?\}", "description": "An environment variable."}


def make_schema() -> dict[str, Any]:
    """The schema as JSON."""
    schema = sections.Config.model_json_schema(by_alias=True)
    for name, definition in [*schema["$defs"].items(), ("Config", schema)]:
        _describe(definition, getattr(sections, name, None) or getattr(art, name))
    required = schema.pop("required")
    schema = cast("dict[str, Any]", _with_variables(schema))
    schema["properties"]["base"] = {"type": "string", "description": "A file that this one is merged over."}
    return {**schema, "if": {"not": {"required": ["base"]}}, "then": {"required": required}}


def _describe(definition: dict[str, Any], model: type[BaseModel]) -> None:
    """Adds the docstrings of a section's fields, which only the source has."""
    for kind in reversed(model.__mro__):
        if not issubclass(kind, BaseModel) or not kind.__module__.startswith("art"):
            continue
        (statement,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for field, text in itertools.pairwise(cast(ast.ClassDef, statement).body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
                continue
            if (known := model.model_fields.get(field.target.id)) is not None:
                property_ = definition["properties"][known.alias or field.target.id]
                property_["description"] = " ".join(str(text.value.value).split())


def _with_variables(schema: Any) -> Any:
    """The schema in which each plain value can also be a text with a variable."""
    if isinstance(schema, list):
        return [_with_variables(entry) for entry in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    widened: dict[str, Any] = {}
    for name, value in fields.items():
        if name in ("properties", "$defs"):
            widened[name] = {key: _with_variables(inner) for key, inner in value.items()}
        elif name in ("items", "additionalProperties", "anyOf"):
            widened[name] = _with_variables(value)
        elif name != "required":  # a `base:` can have the required fields
            widened[name] = value
    if widened.get("type") in ("integer", "number", "boolean") or widened.keys() & {"enum", "const", "pattern"}:
        about = {name: widened.pop(name) for name in ("description", "title", "default") if name in widened}
        return {"anyOf": [widened, VARIABLE], **about}
    return widened
