"""The optional libraries of trackers, imported when they are first used."""

import importlib
import importlib.util
from typing import Any


def import_library(module: str, extra: str) -> Any:  # Any: the library need not be installed
    """A module of an optional library.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(missing(error.name or module, extra)) from error
    if found.__file__ is None:  # a folder of the library's name, such as ./wandb
        raise ImportError(missing(module, extra))
    return found


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported. Imports nothing."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def missing(module: str, extra: str) -> str:
    return f"'{module}' is not installed: pip install 'agent-reinforcement-trainer[{extra}]'"
