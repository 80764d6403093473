"""A judge's usable answers: the newest in memory, all of them in a folder."""

import asyncio
import json
import logging
from collections import OrderedDict
from pathlib import Path

from art.files import write_whole

logger = logging.getLogger(__name__)

MAX_IN_MEMORY = 1_000


class AnswerCache:
    """Texts by digest. With a folder, each text is also a file DIGEST.json, which is complete or absent."""

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._newest: OrderedDict[str, str] = OrderedDict()

    async def get(self, digest: str) -> str | None:
        text = self._newest.get(digest)
        if text is None and self._folder is not None:
            text = await asyncio.to_thread(_read, self._folder / f"{digest}.json")
        return None if text is None else self._remember(digest, text)

    async def put(self, digest: str, text: str) -> None:
        self._remember(digest, text)
        if self._folder is not None:
            await asyncio.to_thread(_write, self._folder / f"{digest}.json", text)

    def _remember(self, digest: str, text: str) -> str:
        self._newest[digest] = text
        self._newest.move_to_end(digest)
        if len(self._newest) > MAX_IN_MEMORY:
            self._newest.popitem(last=False)
        return text


def _read(file: Path) -> str | None:
    try:
        return str(json.loads(file.read_bytes())["answer"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # the file is absent, or not ours
        return None


def _write(file: Path, text: str) -> None:
    try:
        write_whole(file, json.dumps({"answer": text}).encode())
    except OSError as error:  # the answer itself is good
        logger.warning("%s cannot keep a judge's answer: %s", file.parent, error)
