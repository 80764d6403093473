"""`reasoning_gym`: the tasks of reasoning-gym's generators, which score their answers (extra `environments`)."""

import asyncio
import atexit
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START, END = "<answer>", "</answer>"
SCORER = Path(__file__).with_name("scorer.py")


@dataclass(frozen=True, slots=True, eq=False)
class ReasoningTask:
    """A question and its score. A task is a text environment of one turn, so `play` and `art.evaluate` take tasks."""

    question: str
    generator: str
    settings: dict[str, Any]
    """reasoning-gym's arguments for the generator's dataset: size, seed and the generator's own."""
    entry: dict[str, Any]
    """reasoning-gym's item: question, answer, metadata."""

    def score(self, text: str) -> float:
        """The generator's score, from 0 to 1, of the text in the last <answer> tag; without a tag, of the whole text.

        0 for an answer that the generator cannot read or score within the limits of `scorer.py`. Blocks for some
        milliseconds, at most for the limit on time.

        Raises:
            RuntimeError: the process that scores answers cannot make the dataset, or has died; or this is Windows.
        """
        end = text.rfind(END)
        start = text.rfind(START, 0, max(end, 0))
        answer = text if start < 0 else text[start + len(START) : end]
        return _scorer.score(self.generator, self.settings, self.entry, answer.strip())

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """The question. The seed has no effect: a task is one question."""
        del seed
        return self.question, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The score of an answer, which ends the episode."""
        score = await asyncio.to_thread(self.score, action)
        return "", score, True, False, {"solved": score >= 1.0}


class _Scorer:
    """The program's one process that scores answers. It starts with the first answer, and again after it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        """The id of the process that started the scoring process. A fork of the program starts its own scoring process."""
        self._connection: Any = None
        self._process: subprocess.Popen[bytes] | None = None

    def score(self, *request: Any) -> float:
        if sys.platform == "win32":
            raise RuntimeError("answers of reasoning_gym are scored on Linux and macOS: use WSL 2")
        with self._lock:
            connection = self._connect()
            reply: str | float | None = None
            try:
                connection.send(request)
                reply = json.loads(connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise RuntimeError("the process that scores answers has died") from error
            finally:
                if reply is None:  # a late reply would belong to another answer
                    connection.close()
        if isinstance(reply, str):
            raise RuntimeError(f"the process that scores answers cannot make the dataset: {reply}")
        assert reply is not None, "else it was raised"
        return reply

    def _connect(self) -> Any:  # Any: the arguments of `Connection` depend on Python's version
        """The connection to the process. Starts the process without environment variables, in a session that Ctrl-C
        does not reach."""
        if self._connection and not self._connection.closed and self._owner == os.getpid():
            return self._connection
        self.close()
        self._owner = os.getpid()
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(SCORER), str(theirs.fileno())],
                cwd=tempfile.gettempdir(),
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection.send([os.path.abspath(path) for path in sys.path])
        return self._connection

    def close(self) -> None:
        """Ends the process, if there is one: the process ends with its connection."""
        if self._process is not None:
            self._connection.close()
            self._process.wait()


_scorer = _Scorer()
atexit.register(_scorer.close)


def reasoning_gym(
    name: str, *, size: int = 64, seed: int = 0, prompt: str = "{question}", **config: Any
) -> list[ReasoningTask]:
    """`size` tasks of a generator, the same for the same seed. Other seeds give other tasks: hold some seeds out.

    `prompt` is the form of the first message, such as "{question}\\nAnswer with a number only.". `config` has the
    generator's own settings.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
        ValueError: reasoning-gym has no such generator or setting.
    """
    try:
        with warnings.catch_warnings():  # a dependency of reasoning-gym has code that Python warns about
            warnings.simplefilter("ignore", SyntaxWarning)
            gym: Any = importlib.import_module("reasoning_gym")  # the import takes seconds
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reasoning_gym needs pip install '.[environments]' in a clone of the repository",
            name=error.name,
        ) from error
    settings = {"size": size, "seed": seed, **config}
    try:
        dataset: Any = gym.create_dataset(name, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make '{name}' with {config}: {error}") from error
    return [
        ReasoningTask(prompt.replace("{question}", entry["question"]), name, settings, entry)
        for entry in (dataset[index] for index in range(size))
    ]
