"""The optional libraries of trackers, which are imported at their first use, and the one warning of a tracker that fails."""

import importlib
import importlib.util
import logging
import re
from typing import Any

logger = logging.getLogger("art.trackers")

_PASSWORD = re.compile(r"://[^/@\s]+@")
"""User and password in the address of a tracker. The errors of the tracker's library quote the address."""


def import_library(module: str, extra: str) -> Any:  # Any: the library need not be installed
    """A module of an optional library.

    Raises:
        ImportError: the library is not installed; the message names the extra.
    """
    try:
        library = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(missing(error.name or module, extra)) from error
    if library.__file__ is None:  # a folder of the library's name, such as ./wandb
        raise ImportError(missing(module, extra))
    return library


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported. Imports nothing."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def missing(module: str, extra: str) -> str:
    return f"'{module}' is not installed: pip install '.[{extra}]' in a clone of the repository"


class OneWarning:
    """The only warning of one tracker."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_given = False

    def give(self, reason: str) -> None:
        """Logs the reason, unless there was a warning before."""
        if not self._is_given:
            self._is_given = True
            logger.warning(
                "tracker %s: %.500s. Nothing else depends on it; this is its only warning",
                self._name,
                _PASSWORD.sub("://***@", reason),
            )
