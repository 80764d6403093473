"""The page docs/train-config.md: every field of `art.TrainConfig` with its default, and the presets, from art_protocol/wire.py."""

import ast
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from art_protocol.wire import PRESETS, LossConfig, TrainConfig

SOURCE = Path(__file__).parents[1] / "art_client" / "art_protocol" / "wire.py"
HEAD = """# Train configuration

The fields of `art.TrainConfig`, which `model.train(groups, config=...)` takes (`scripts/pages` writes this page). A preset
supplies the fields of the loss that are not given. The job's report (`result.report.config`) has the values in force. Formulas
and sources: [training.md](training.md).

"""


def page() -> str:
    """The whole page."""
    meanings = docstrings(TrainConfig) | docstrings(LossConfig)
    own = [name for name in TrainConfig.model_fields if name not in LossConfig.model_fields]
    parts = [HEAD, "## Training\n\n", fields(own, meanings)]
    parts += ["\n## Loss\n\n", fields(list(LossConfig.model_fields), meanings)]
    return "".join([*parts, "\n## Presets\n\n", presets()])


def docstrings(model: type) -> dict[str, str]:
    """The docstring under each field of a model, on one line."""
    tree = ast.parse(SOURCE.read_text())
    (definition,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__]
    meanings: dict[str, str] = {}
    for field, behind in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            meanings[field.target.id] = " ".join(str(behind.value.value).split())  # type: ignore[union-attr]
    return meanings


def fields(names: list[str], meanings: dict[str, str]) -> str:
    """A table of fields with default, values and meaning."""
    lines = ["| field | default | values | meaning |", "|---|---|---|---|"]
    for name in names:
        field = TrainConfig.model_fields[name]
        shown = f"`{field.default!r}`"
        lines.append(f"| `{name}` | {shown} | {values(field.annotation)} | {escaped(meanings.get(name, ''))} |")
    return "\n".join(lines) + "\n"


def values(annotation: Any) -> str:  # Any: a type form
    """The values that a field takes, in words."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{option}`" for option in get_args(annotation))
    if get_origin(annotation) is list:
        return "a list"
    parts = [argument for argument in get_args(annotation) if argument is not type(None)]
    if parts and get_origin(annotation) is not None and not isinstance(annotation, type):
        return " or ".join(dict.fromkeys(values(part) for part in parts if values(part)))
    names = {float: "a number", int: "an integer", bool: "true or false", str: "text"}
    return names.get(annotation, "")


def presets() -> str:
    """A table of the presets: what each changes."""
    lines = ["| preset | fields |", "|---|---|"]
    for name, loss in PRESETS.items():
        changed = loss.model_dump(exclude_unset=True)
        shown = ", ".join(f"`{field}={value!r}`" for field, value in changed.items())
        lines.append(f"| `{name}` | {shown or 'the defaults'} |")
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")
