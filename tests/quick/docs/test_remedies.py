"""What the sentences of the product name exists: each flag, command, field and function in its string literals. So a remedy can
be followed."""

import argparse
import ast
import asyncio
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.resources.chat.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses
from pydantic import BaseModel

import art
from art.finetune import sections
from art_protocol import wire
from art_server.flags import make_parser as make_server_parser
from art_server.machines import host
from art_server.parser import Parser
from art_watch.terminal.cli import make_parser
from tests.pages import ROOT

FOLDERS = ("art_client", "art_server", "art_watch", "plugins")
OTHERS_FILES = {
    "differences.py": "the style of a page, whose variables look like flags",
    "bubblewrap.py": "command lines of bwrap and setpriv",
    "container.py": "command lines of docker and podman",
}
"""Files with flags of others."""
OTHERS_FLAGS = {
    "--device": "the trainer's facts",
    "--format=gnu": "tar",
    "--gpus": "docker",
    "--head": "ray",
    "--lora-target-modules": "vLLM",
    "--max-model-len": "vLLM",
    "--python": "uv",
    "--tool-call-parser": "vLLM",
}
"""Flags of other programs, and of processes of ours."""
OTHER_PROGRAMS = {"curl", "hf", "nat", "python", "sky", "wandb"}
WORDS = {
    "async with": "of Python",
    "with": "of Python",
    "base": "a key of a finetuning file (`art.finetune.reading`)",
    "conversations": "ShareGPT",
    "from": "ShareGPT",
    "value": "ShareGPT",
    "content": "of a message",
    "tool_calls": "of a message",
    "reasoning_content": "of a message",
    "format": "of a custom tool of the Responses API",
    "structured_outputs": "vLLM's field of a request",
    "output": "a parameter of an evaluator",
    "contains": "an evaluator (`art.finetune.components`)",
    "_type: command": "a workflow (`art.finetune.components`)",
}
"""Words that no record, function or command of ours has, and whose they are."""
CHOICE = {"art.id", "art.step"}
"""Fields of a choice (`choice.art`)."""
ROOTS: dict[str, Any] = {"art": art, "asyncio": asyncio, "model": art.TrainableModel, "art_compat": None}
"""What a name at the beginning of an expression is; None: not looked into."""


class Flags(Parser):
    """A parser whose error is an exception."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


def literals() -> Iterator[tuple[str, Path]]:
    """The string literals of the product, without docstrings, assertions and SQL. A part that is computed is "{}"."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    for file in files:
        if not {"tests", "scripts"} & {*file.relative_to(ROOT).parts}:
            yield from ((text, file) for text in _texts(ast.parse(file.read_text())) if "CREATE TABLE" not in text)


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assert):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)


TEXTS = list(literals())
FLAG = re.compile(r"(?<![\w'-])--[a-z][a-z_-]+(?:=[a-z]+)?\b")
QUOTED = sorted({part for text, _ in TEXTS if "(?" not in text for part in re.findall(r"`([^`\n]+)`", text)})


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def host_parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(Parser, "parse_args", lambda parser, _: parsers.append(parser))
    host.parse([])
    monkeypatch.undo()
    return parsers[0]


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by the command's words."""
    commands = {f"art {name}": parser for name, parser in subparsers(make_parser()).items()}
    return {"art-server": make_server_parser(), "art-server host": host_parser(monkeypatch), **commands}


def test_each_flag_is_of_a_command(parsers: dict[str, argparse.ArgumentParser]) -> None:
    flags = {flag for parser in parsers.values() for flag in parser._option_string_actions} | OTHERS_FLAGS.keys()
    unknown = {
        flag: file.name
        for text, file in TEXTS
        for flag in FLAG.findall(text)
        if flag not in flags and flag.partition("=")[0] not in flags and file.name not in OTHERS_FILES
    }
    assert unknown == {}


def records() -> set[str]:
    """The names of fields of records, of parameters of public functions, and of extras."""
    owners = [*vars(wire).values(), *vars(sections).values(), *(getattr(art, name) for name in art.__all__)]
    kinds = [kind for kind in owners if isinstance(kind, type) and issubclass(kind, BaseModel)]
    names = {name for kind in kinds for name in kind.model_fields}
    functions = [entry for kind in (*kinds, art.Rollout, art.Backend) for entry in vars(kind).values()]
    functions += [getattr(art, name) for name in art.__all__]
    functions += [AsyncCompletions.create, AsyncResponses.create, art.TrainableModel.log, art.TrainableModel.register]
    for function in functions:
        if inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            names |= {function.__name__, *inspect.signature(function).parameters}
        elif isinstance(function, property) and function.fget is not None:
            names.add(function.fget.__name__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return names | project["optional-dependencies"].keys()


NAMES = records()


def is_command(text: str, parsers: dict[str, argparse.ArgumentParser]) -> bool:
    """Whether a text is a command line, with flags that the command has."""
    words = shlex.split(text)
    name = max((name for name in parsers if text == name or text.startswith(f"{name} ")), key=len, default=None)
    if name is None:
        return words[0] in OTHER_PROGRAMS
    flags = [word for word in words if word.startswith("--")]
    return all(flag in parsers[name]._option_string_actions for flag in flags)


def is_expression(text: str) -> bool:
    """Whether a text is an expression of Python, with names that exist."""
    text = text.removeprefix("return ").replace("{}", "_")
    try:
        tree = ast.parse(f"async def _():\n  return {text}")
    except SyntaxError:
        return False
    return all(_exists(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Call | ast.Name))


def _exists(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        function = _value(node.func)
        is_known = callable(function) and function is not AttributeError
        parameters = inspect.signature(function).parameters if is_known else None
        names = [keyword.arg for keyword in node.keywords]
        return parameters is None or all(name in parameters for name in names)
    return not isinstance(node, ast.Attribute) or ast.unparse(node) in CHOICE or _value(node) is not AttributeError


def _value(node: ast.AST) -> Any:
    """What an expression is; None: unknown. AttributeError: there is no such thing."""
    if isinstance(node, ast.Name):
        return ROOTS.get(node.id)
    owner = _value(node.value) if isinstance(node, ast.Attribute) else None
    if not isinstance(node, ast.Attribute) or owner is None or owner is AttributeError:
        return owner
    return getattr(owner, node.attr, AttributeError)


def is_field(text: str) -> bool:
    """Whether a text is the name of a field, parameter or extra, or NAME=VALUE or NAME: VALUE."""
    name, separator, value = re.fullmatch(r"(\w+)(=|: |)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if separator == "=" and name in art.TrainConfig.model_fields:
        art.TrainConfig(**{name: ast.literal_eval(value), "overlong_length": 9, "overlong_buffer": 3})
    return name in NAMES and (bool(separator) or not value)


@pytest.mark.parametrize("text", QUOTED)
def test_what_a_sentence_names_exists(text: str, parsers: dict[str, argparse.ArgumentParser]) -> None:
    if text.startswith("-"):
        return  # `-o KEY`: plugins/finetune/tests/test_commands.py follows it; flags: above
    if text == "{}" or text == "%s" or text.startswith("{} ") or text in WORDS:
        return
    if text.startswith("/"):
        routes = (ROOT / "docs" / "routes.md").read_text()
        assert text == "/openapi.json" or f"`{text}`" in routes
    elif re.fullmatch(r"\w+((=|: ).*)?", text):
        assert is_field(text), text
    elif re.match(r"(return |await )*[\w.{}]+[(.]", text):
        assert is_expression(text), text
    else:
        assert is_command(text, parsers), text


def test_the_check_refuses_what_does_not_exist(parsers: dict[str, argparse.ArgumentParser]) -> None:
    assert not is_command("art exprot MODEL DIR", parsers) and not is_command("art-server --prot 5", parsers)
    assert not is_expression("await model.rolback({})") and not is_expression(
        "art.TrainableModel(lora=art.LoraConfig())"
    )
    assert not is_expression("model.rollback(steps=3)") and not is_field("lerning_rate")
    assert {*WORDS} <= {*QUOTED} and {*OTHERS_FLAGS} <= {f for text, _ in TEXTS for f in FLAG.findall(text)}
