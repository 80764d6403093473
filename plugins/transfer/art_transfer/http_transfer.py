"""Downloads and uploads checkpoints over HTTP, for the command line. A broken transfer begins anew."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

import httpx
from pydantic import ValidationError

from art_protocol.proxies import fault_of_address
from art_protocol.wire import CheckpointList, ErrorBody, ModelInfo, ModelList, Reply
from art_server.errors import InvalidInput, Unavailable
from art_server.store.archive import Description, read_tar, write_tar
from art_watch.remote import open_client

BUSY = (429, 502, 503, 504)
"""Statuses after which the request is repeated: the server is busy, or a proxy does not reach it."""
ATTEMPTS = 6
WAIT_SECONDS = 2.0
"""Pause after a failed attempt."""
ANSWER_SECONDS = 1800.0
"""Read timeout: after an upload the server checks the checkpoint on the base model, and may first wait for a step."""


T = TypeVar("T")
R = TypeVar("R", bound=Reply)


class TransferClient:
    """Client of a server; sends the key of ART_API_KEY."""

    def __init__(self, url: str):
        self._http = open_client(url, httpx.Timeout(60.0, read=ANSWER_SECONDS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def download(self, project: str, name: str, step: str, content: Path) -> Description:
        """Downloads a model's step (a number or "best"; empty: the serving step) into a new folder and returns its description.

        Raises:
            InvalidInput: there is no such model or step, or the received checkpoint is invalid.
            Unavailable: all attempts failed.
        """
        info = self._find(project, name)
        number = self._best_step(info) if step == "best" else int(step or info.step)
        path = checkpoint_path(info.project, info.name, number)
        tar = content.with_suffix(".tar")

        def fetch() -> None:
            with self._http.stream("GET", path) as response, open(tar, "wb") as file:
                raise_refusal(response)
                for piece in response.iter_raw():
                    file.write(piece)

        repeat(fetch)
        with open(tar, "rb") as file:
            description = read_tar(file, content)
        tar.unlink()
        return description

    def upload(self, project: str, name: str, content: Path, description: Description) -> None:
        """Uploads a checkpoint as a step of a model.

        Raises:
            InvalidInput: the server refuses the checkpoint.
            Unavailable: all attempts failed.
        """
        path = checkpoint_path(project, name, description.step)
        with tempfile.TemporaryFile() as tar:
            write_tar(content, description, tar)

            def send() -> ModelInfo:
                tar.seek(0)
                return read_reply(ModelInfo, self._http.put(path, content=tar))

            repeat(send)

    def _best_step(self, info: ModelInfo) -> int:
        path = f"/api/models/{info.project}/{info.name}/checkpoints"
        kept = repeat(lambda: read_reply(CheckpointList, self._http.get(path))).checkpoints
        best = next((checkpoint.step for checkpoint in kept if checkpoint.is_best), None)
        if best is None:
            raise InvalidInput(no_best_step(info.inference_name), code="unknown_step")
        return best

    def _find(self, project: str, name: str) -> ModelInfo:
        models = repeat(lambda: read_reply(ModelList, self._http.get("/api/models"))).models
        matches = [model for model in models if model.name == name and project in ("", model.project)]
        if len(matches) != 1:
            known = ", ".join(model.inference_name for model in matches or models) or "none"
            raise InvalidInput(
                f"'{name}' is {'one of several models' if matches else 'no model'} of {self._http.base_url}; models: "
                f"{known}. Write PROJECT/NAME",
                code="unknown_model",
            )
        return matches[0]


def no_best_step(model: str) -> str:
    """The refusal of "@best"."""
    return f"{model} has no best step: no kept step has val/reward, train/reward or val/loss in the history. Write {model}@NUMBER"


def checkpoint_path(project: str, name: str, step: int) -> str:
    return f"/api/models/{project}/{name}/checkpoints/{step}.tar"


def repeat(request: Callable[[], T]) -> T:
    """Returns the request's result. Retries while the server is unreachable or busy.

    Raises:
        Unavailable: the last attempt failed too.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return request()
        except (httpx.TransportError, Unavailable):
            time.sleep(WAIT_SECONDS)
    try:
        return request()
    except httpx.TransportError as error:
        address = str(error.request.url)
        remedy = fault_of_address(address, error) or "start art-server there, or name another server with --url"
        raise Unavailable(f"no answer from the server at {address} ({error!r}): {remedy}", code="no_server") from error


def read_reply(kind: type[R], response: httpx.Response) -> R:
    """Parses the body of a successful response.

    Raises:
        InvalidInput: the server refused the request, or is not an art-server.
        Unavailable: the server is busy, or a proxy does not reach it.
    """
    raise_refusal(response)
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise InvalidInput(f"no art-server answers at {response.url}", code="no_server") from error


def raise_refusal(response: httpx.Response) -> None:
    """Raises the error that a response carries, if any.

    Raises:
        Unavailable: a status of `BUSY`.
        InvalidInput: any other error status, with the server's message.
    """
    if response.is_success:
        return
    response.read()
    try:
        error = ErrorBody.model_validate_json(response.content).error
    except ValidationError:
        error = None
    message = error.message if error else f"{response.status_code} {response.reason_phrase}"
    if response.status_code in BUSY:
        raise Unavailable(message, code="unavailable")
    raise InvalidInput(message, code=error.code if error else "refused")
