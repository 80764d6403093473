"""The sentences of errors, which no other test holds: the place, what is wrong, and the remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_protocol.wire import LoRAConfig
from art_server.api.openai.grammars import check_grammars
from art_server.errors import ServerError
from art_server.store.base_facts import read_facts
from art_server.store.registry import Registry, check_lora
from tests.new_models import add_model


def two_projects(root: Path) -> Registry:
    registry = Registry(root)
    for project in ("Demo", "q"):
        add_model(registry, project=project)
    return registry


SENTENCES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "ambiguous_model": (
        lambda root: two_projects(root).resolve("a", None, None),
        "model 'a' exists in several projects (Demo, q): write PROJECT/a",
    ),
    "unknown_step": (
        lambda root: two_projects(root).resolve("q/a@first", None, None),
        "'first' is not a step: write q/a@0 or q/a@best",
    ),
    "name_differs_by_case": (
        lambda root: two_projects(root).folder("demo", "b"),
        "project 'demo' differs from the existing project 'Demo' by case only, and on some systems both are one folder: "
        "use 'Demo', or another name",
    ),
    "lora_differs": (
        lambda _: check_lora(LoRAConfig(rank=4), LoRAConfig(rank=8), "p/a"),
        "model 'p/a' has a LoRA of {'rank': 4, 'alpha': 16.0, 'target_modules': None}; it cannot be changed to "
        "{'rank': 8, 'alpha': 16.0, 'target_modules': None}: register another name",
    ),
    "unknown_base_model": (
        lambda root: read_facts(root / "nothing"),
        "FOLDER/nothing has no config.json, which tells what model it is",
    ),
    "invalid_body": (lambda _: check_grammars("chat", {"tools": {}}), "tools: it must be a list"),
    "unknown_option": (
        lambda _: check_grammars("chat", {"guided_regex": "a"}),
        "guided_regex: the engine does not know this option in a request and would ignore it; use `structured_outputs` "
        "or `response_format` instead",
    ),
}
"""By the error's code."""


@pytest.mark.parametrize("code", SENTENCES)
def test_an_error_says_the_place_the_reason_and_the_remedy(code: str, tmp_path: Path) -> None:
    call, sentence = SENTENCES[code]
    with pytest.raises(ServerError) as refused:
        call(tmp_path)
    assert refused.value.code == code
    assert refused.value.message.replace(str(tmp_path), "FOLDER") == sentence
