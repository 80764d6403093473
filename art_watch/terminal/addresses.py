"""What the words of a command line name: a source, a model, a step, a job."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from art_protocol.running_server import running_address
from art_server.errors import NotFound, ServerError, Unavailable, UsageError
from art_server.store.registry import known_models
from art_watch.terminal.sources import FolderSource, HttpSource, Row, Source
from art_watch.terminal.text import visible

MAX_NAMED = 5
"""Steps and splits that an error lists."""
DEFAULT_PATH = Path(".art")
"""The default of `--path` in `commands.py`."""
DEFAULT_URL = "http://127.0.0.1:7623"
"""The address of `art.Backend()`, unless ART_SERVER_URL names another."""
MAX_DIGITS = 9
"""The most digits of a step."""
JOB_DIGITS = 32
"""The number of digits of a job's id."""


def open_source(url: str | None, path: Path) -> Source:
    """The server at `url`. Without `url`: the server that works in the folder `path`, or else the folder. If the default
    folder does not exist: the server of `art.Backend()`.

    Raises:
        NotFound: there is no such folder, and no such server.
        UsageError: the address or the key cannot be sent.
    """
    if url is not None:
        return HttpSource(url)
    if not path.is_dir():
        return _default_server(path)
    address = running_address(path)
    if address is not None:
        source = HttpSource(address)
        try:
            source.overview()
            return source
        except ServerError as error:
            source.close()
            print(f"art: {error}. Reading the files in {path}", file=sys.stderr)
    return FolderSource(path)


def _default_server(path: Path) -> Source:
    """The server of `art.Backend()`, if no other folder than the default folder was named.

    Raises:
        NotFound: another folder was named, or there is no such server.
    """
    missing = f"there is no folder {path}"
    if path == DEFAULT_PATH:
        source = HttpSource(os.environ.get("ART_SERVER_URL") or DEFAULT_URL)
        try:
            source.overview()
            return source
        except Unavailable:
            source.close()
            missing += f", and no server at {source.where}"
    raise NotFound(
        f"{missing}: name the folder of a server with --path, or a server with --url",
        code="unknown_folder",
    )


def need_server(source: Source, what: str = "jobs") -> HttpSource:
    """The source as a running server, which has `what`.

    Raises:
        NotFound: the source is a folder.
    """
    if isinstance(source, FolderSource):
        raise NotFound(
            f"only a running server has {what}: start art-server in {source.where}, or name a server with --url",
            code="no_server",
        )
    return source


def find_model(source: Source, text: str) -> tuple[Row, str]:
    """The summary of the model that [PROJECT/]NAME[@STEP] names, and the text behind "@".

    Raises:
        NotFound: there is no such model, or several have this name.
    """
    name, _, step = text.partition("@")
    models = source.overview()["models"]
    matches = [model for model in models if name in (model["id"], model["name"])]
    if len(matches) != 1:
        ids = [visible(model["id"]) for model in matches or models]
        known = f"models: {listed(ids)}" if matches else known_models(visible(name), ids)
        raise NotFound(
            f"'{name}' is {'one of several models' if matches else 'no model'} of {source.where}; {known}. Write "
            "PROJECT/NAME, and name a server's folder with --path or a server with --url",
            code="unknown_model",
        )
    return matches[0], step


def find_step(source: Source, model: Row, text: str, split: str) -> int:
    """The step that the text behind "@" names. Without a text, the newest step that has rollouts of the split.

    Raises:
        NotFound: the step has no rollouts of this split; the message lists steps that have rollouts.
        UsageError: the text is no step.
    """
    splits = source.splits(model["id"])
    steps = splits.get(split, [])
    if text in ("", "latest"):
        step = max(steps, default=None)
    elif text == "best":
        step = model["best"] and model["best"]["step"]
    else:
        step = parse_step(text, f"write {model['id']}@NUMBER, @best or @latest")
    if step not in steps:
        at_step = "" if step is None else f" at step {step}"
        raise NotFound(
            f"model '{model['id']}' has no rollouts of split '{split}'{at_step}; newest steps with rollouts: "
            f"{listed(steps[::-1])}; splits: {listed(list(splits))}",
            code="unknown_step",
        )
    return step


def parse_step(text: str, remedy: str) -> int:
    """The number of a step.

    Raises:
        UsageError: the text is no number of a step; `remedy` is the end of the message.
    """
    if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS:
        return int(text)
    raise UsageError(f"'{text}' is no step: {remedy}")


def find_job(server: HttpSource, digits: str) -> str:
    """The id of the job in the queue that begins with these digits. A whole id is returned as it is, and may name a job that
    is not in the queue.

    Raises:
        NotFound: the id of no job in the queue, or of several, begins with these digits.
    """
    if len(digits) == JOB_DIGITS and digits.isalnum():
        return digits
    known = [job["job_id"] for job in server.jobs(with_ended=False)]
    matches = [job_id for job_id in known if digits and job_id.startswith(digits)]
    if len(matches) != 1:
        raise NotFound(
            f"'{digits}' begins {'the ids of several jobs' if matches else 'the id of no job'} in the queue of "
            f"{server.where}: `art jobs` lists them",
            code="unknown_job",
        )
    return matches[0]


def listed(values: Sequence[object]) -> str:
    """The first of some names, for an error. Control characters are visible, because the names come from files or a server:
    `['a', 'b'] -> 'a, b'`."""
    more = f" and {len(values) - MAX_NAMED} more" if len(values) > MAX_NAMED else ""
    return (", ".join(map(visible, values[:MAX_NAMED])) or "none") + more
