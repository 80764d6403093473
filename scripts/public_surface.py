"""The public surface as JSON: names and signatures of the client, routes and bodies, flags. Programs, other clients and
stored files rely on it. Texts for people (descriptions, help) are omitted.

    .venv/bin/python -m scripts.public_surface     writes tests/quick/unit/public.json

`tests/quick/unit/test_public.py` compares the file with the code. A change of the file affects users and belongs in
CHANGELOG.md.
"""

import argparse
import inspect
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import art
from art_server.app import make_app
from art_server.flags import make_parser
from art_server.server import build
from art_server.settings import ServerConfig

FILE = Path(__file__).parents[1] / "tests" / "quick" / "unit" / "public.json"
FOR_PEOPLE = {"title", "description", "summary", "operationId"}


def surface() -> dict[str, Any]:
    """Everything that is compared."""
    return {"art": names(), "flags": flags(), "openapi": routes()}


def names() -> dict[str, Any]:
    """Each public name with its signature; for a class, also the signatures of its public methods."""
    return {name: shape(getattr(art, name)) for name in sorted({*art.__all__, *art._MODULE_BY_NAME, "dev"})}


def shape(value: Any) -> Any:  # Any: any object that `art` exports
    if inspect.ismodule(value):
        return sorted(value.__all__)
    if inspect.isclass(value):
        public = {name for name in dir(value) if not name.startswith("_")}
        inherited: set[str] = set()
        for base in value.__mro__[1:]:
            if base.__module__.partition(".")[0] not in ("art", "art_compat"):
                inherited |= vars(base).keys()
        own = sorted(public - inherited)
        return {"": signature(value)} | {name: signature(inspect.getattr_static(value, name)) for name in own}
    return signature(value)


def signature(value: Any) -> str:
    """Parameters and defaults, without annotations: their spelling may change."""
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if not callable(value):
        return "property" if isinstance(value, property) else "value"
    try:
        full_signature = inspect.signature(value)
    except ValueError:
        return "callable"
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in full_signature.parameters.values()]
    text = str(full_signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return text if " at 0x" not in text else "callable"


def flags() -> dict[str, Any]:
    return {
        " ".join(action.option_strings): {
            "default": repr(action.default),
            "choices": list(action.choices) if action.choices is not None else None,
            "nargs": action.nargs,
            # argparse has no public name for it.
            "repeats": isinstance(action, argparse._AppendAction),
        }
        for action in make_parser()._actions
    }


def routes() -> Any:
    with TemporaryDirectory() as folder:
        config = ServerConfig(path=Path(folder))
        return without_texts(make_app(build(config), inference_port=None).openapi())


def without_texts(value: Any, *, are_names: bool = False) -> Any:
    """The schema without texts for people. With `are_names`, the keys are names (such as fields) and are all kept."""
    if isinstance(value, dict):
        return {
            key: without_texts(entry, are_names=key in ("properties", "schemas", "paths", "$defs"))
            for key, entry in sorted(value.items())
            if are_names or key not in FOR_PEOPLE
        }
    if not isinstance(value, list):
        return value
    values = [without_texts(entry) for entry in value]
    return sorted(values, key=json.dumps) if all(isinstance(entry, dict) for entry in values) else values


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n")
