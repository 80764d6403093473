import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import art
from art import types
from scripts.import_graph import type_checkers_names

LAZY = art._MODULE_BY_NAME


def test_exported_names_are_those_of_all():
    private = {"annotations", "TYPE_CHECKING", "Any"}
    modules = {name for name, value in vars(art).items() if inspect.ismodule(value)}
    modules -= {"types"}
    public = {name for name in vars(art) if not name.startswith("_")} - private - modules - LAZY.keys()
    assert public | (LAZY.keys() & set(art.__all__)) == set(art.__all__)
    assert sorted(art.__all__) == sorted(set(art.__all__))
    assert all(getattr(art, name) is not None for name in art.__all__)


def test_type_checkers_read_the_modules_that_names_are_imported_from():
    names = type_checkers_names(Path(art.__file__))
    assert {name: module for name, module in names.items() if not name.startswith("_")} == LAZY


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Trajectroy"):
        _ = art.Trajectroy  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="Chioce"):
        _ = types.Chioce  # pyright: ignore[reportAttributeAccessIssue]


IMPORT = """
import sys
import art
heavy = "openai httpx httpx2 sky yaml torch vllm transformers fastapi wandb numpy".split()
print(*(name for name in heavy if name in sys.modules))
"""


def test_import_loads_nothing_heavy():
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_types_choice_is_the_openai_class():
    from openai.types.chat.chat_completion import Choice

    assert types.Choice is Choice
