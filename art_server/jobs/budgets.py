"""Token budgets that fitted after memory ran out: the server keeps them, and sends them with each train task.

Ranks run on machines that come and go, and plan a job alike only from the same numbers. The trainer makes the keys
(`trainer/token_budget.py`).
"""

import logging
import threading
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from art_server.store import files

logger = logging.getLogger(__name__)

CONTENT = TypeAdapter(dict[str, int])


class Budgets:
    """One JSON file, so that later jobs and servers do not fail again; delete it to try larger budgets. Blocking."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        """Several gangs may learn at the same time."""

    def read(self) -> dict[str, int]:
        """Tokens by key; empty if nothing was learned, or if an edited file has other content."""
        try:
            return CONTENT.validate_json(self.file.read_bytes())
        except FileNotFoundError:
            return {}
        except ValidationError as error:
            logger.warning("%s cannot be read, so that nothing is learned: %s", self.file, error)
            return {}

    def learn(self, key: str, tokens: int) -> None:
        """Stores a budget, on disk when this returns. If two gangs learn the same key, the smaller budget counts."""
        with self._lock:
            known = self.read()
            files.write_json(self.file, known | {key: min(tokens, known.get(key, tokens))})
