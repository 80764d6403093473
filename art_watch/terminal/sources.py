"""Where the commands read: a running server, through the routes of its page, or a folder. Both return the same JSON.

A model is named by its id, PROJECT/NAME.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import httpx
from pydantic import ValidationError

from art_protocol.proxies import fault_of_address
from art_protocol.wire import NDJSON, ErrorBody
from art_server.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    ServerError,
    Unauthorized,
    Unavailable,
)
from art_server.settings import KEY_VARIABLE
from art_server.store.model_folder import ModelFolder
from art_watch import scores
from art_watch.messages import entry_row
from art_watch.remote import open_client
from art_watch.runs import Runs
from art_watch.terminal.text import visible

ANSWER_SECONDS = 60.0
CANCEL_SECONDS = 600.0
"""A job that trains is cancelled before its next micro-batch."""
MAX_JOBS, MAX_WITH_ENDED = 1000, 100
SAMPLED_STEP = "sampled_step"
"""The metric with the step that sampled the rollouts of a step."""
ERRORS: Mapping[int, type[ServerError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    429: Unavailable,
    503: Unavailable,
}
Row = dict[str, Any]


class FolderSource:
    """The files of a server's folder. Only a running server has jobs."""

    def __init__(self, path: Path):
        self._runs = Runs(path)
        self.where = str(path)

    def close(self) -> None: ...

    def overview(self) -> Row:
        models = [self._runs.summary(folder) for folder in self._runs.folders()]
        return {"models": models, "time": time.time(), "live": None}

    def history(self, model: str, metrics: Sequence[str]) -> Row:
        history = self._runs.history(self._folder(model))
        return history.columns(metrics) | {"names": history.names()}

    def context(self, model: str) -> Row:
        from art_watch.context import context  # needs the packages of a job's row

        return context(self._runs, self._folder(model))

    def checkpoints(self, model: str) -> list[Row]:
        return self._runs.checkpoints(self._folder(model))

    def splits(self, model: str) -> dict[str, list[int]]:
        return self._runs.splits(self._folder(model))

    def groups(self, model: str, split: str, step: int, text: str) -> list[Row]:
        from art_watch import rollouts  # needs numpy and safetensors

        return rollouts.groups(self._folder(model), split, step, text)

    def rollout(self, model: str, split: str, step: int, group: int, index: int) -> Row:
        from art_watch import rollouts  # needs numpy and safetensors

        row = rollouts.rollout(self._folder(model), split, step, group, index)
        return row | {"scores": scores.of_rollout(self._folder(model), row)}

    def _folder(self, model: str) -> ModelFolder:
        project, _, name = model.partition("/")
        return self._runs.folder(project, name)


class HttpSource:
    """A running server. Sends the key of ART_API_KEY."""

    def __init__(self, url: str):
        self._http = open_client(url, ANSWER_SECONDS)
        self.where = url.rstrip("/").removesuffix("/v1")

    def close(self) -> None:
        self._http.close()

    def overview(self) -> Row:
        return self._call("GET", "/api/look/overview")

    def history(self, model: str, metrics: Sequence[str]) -> Row:
        path = f"/api/look/models/{model}/history"
        return self._call("GET", path, params={"metric": list(metrics)})

    def context(self, model: str) -> Row:
        fields = self._call("GET", f"/api/look/models/{model}/context")
        del fields["can_change"]  # of the page
        return fields

    def checkpoints(self, model: str) -> list[Row]:
        return self._call("GET", f"/api/look/models/{model}/checkpoints")["checkpoints"]

    def roll_back(self, model: str, step: int) -> None:
        """Makes an earlier step the newest."""
        self._call("POST", f"/api/models/{model}/rollback", json={"step": step})

    def set_about(self, model: str, about: Row) -> None:
        """Replaces tags, notes and the price of a run."""
        self._call("PUT", f"/api/models/{model}/about", json=about)

    def splits(self, model: str) -> dict[str, list[int]]:
        return self._call("GET", f"/api/look/models/{model}/rollouts")["splits"]

    def groups(self, model: str, split: str, step: int, text: str) -> list[Row]:
        path = f"/api/look/models/{model}/rollouts/{split}/{step}"
        return self._call("GET", path, params={"text": text})["groups"]

    def rollout(self, model: str, split: str, step: int, group: int, index: int) -> Row:
        return self._call("GET", f"/api/look/models/{model}/rollouts/{split}/{step}/{group}/{index}")

    def session(self, model: str, session: str) -> Row:
        """The conversations of a session, in the form of a rollout."""
        reply = self._call("GET", f"/api/models/{model}/sessions/{session}")
        histories = [
            {
                "entries": [entry_row(entry, None) for entry in history["messages_and_choices"]],
                "tools": history["tools"],
            }
            for history in reply["histories"]
        ]
        choices = scores.choices_of(histories)
        params = {"session": session, "choice": choices[: scores.MAX_CHOICES]}
        judgements = self._call("GET", f"/api/look/models/{model}/scores", params=params)["scores"]
        logs = [f"{count} answers left out: {reason}" for reason, count in reply["unused"].items()]
        return {"metrics": {}, "metadata": {}, "logs": logs, "scores": judgements, "histories": histories}

    def learning(self, model: str) -> Row:
        """How a model learns from scores."""
        return self._call("GET", f"/api/models/{model}/learning")

    def set_policy(self, model: str, policy: Row) -> Row:
        return self._call("PUT", f"/api/models/{model}/learning", json=policy)

    def change_learning(self, model: str, action: str) -> Row:
        """Pauses or resumes a model's learning, trains what waits ("train"), or turns the learning off."""
        if action == "off":
            return self._call("DELETE", f"/api/models/{model}/learning")
        return self._call("POST", f"/api/models/{model}/learning", json={"action": action})

    def give_feedback(self, model: str, lines: Sequence[bytes]) -> list[Row]:
        """Sends scores, and returns a row for each line: the score, or its error."""
        headers = {"content-type": NDJSON}
        response = self._request("POST", f"/api/models/{model}/feedback", content=b"\n".join(lines), headers=headers)
        return [json.loads(line) for line in response.text.splitlines()]

    def jobs(self, *, with_ended: bool) -> list[Row]:
        states = "queued,running" + (",done,failed,cancelled" if with_ended else "")
        params = {"state": states, "limit": str(MAX_WITH_ENDED if with_ended else MAX_JOBS)}
        return self._call("GET", "/api/jobs", params=params)["jobs"]

    def cancel(self, job_id: str) -> Row:
        return self._call("DELETE", f"/api/jobs/{job_id}", timeout=CANCEL_SECONDS)

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:  # Any: httpx's options
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._no_answer(error) from error
        self._check(response)
        return response

    def _call(self, method: str, path: str, **options: Any) -> Any:  # Any: JSON, httpx's options
        response = self._request(method, path, **options)
        try:
            return response.json()
        except ValueError as error:
            raise self._no_art_server() from error

    def _check(self, response: httpx.Response) -> None:
        """Raises the error in a response, if there is an error."""
        if response.is_success:
            return
        kind = ERRORS.get(response.status_code, InvalidInput)
        try:
            error = ErrorBody.model_validate_json(response.content).error
        except ValidationError as invalid:
            if kind is Unavailable:  # a proxy in front of the server answered
                raise Unavailable(
                    f"{self.where} answers {response.status_code}: try again", code="unavailable"
                ) from invalid
            raise self._no_art_server() from invalid
        if error.code == "unknown_route":
            raise self._no_art_server()
        remedy = f" (the key is read from {KEY_VARIABLE})" if kind in (Unauthorized, Forbidden) else ""
        raise kind(visible(error.message) + remedy, code=error.code)

    def _no_answer(self, error: httpx.TransportError) -> Unavailable:
        remedy = "start art-server there, or name another server with --url or a folder with --path"
        return Unavailable(
            f"no answer from {self.where} ({str(error) or type(error).__name__}): "
            f"{fault_of_address(self.where, error) or remedy}",
            code="no_server",
        )

    def _no_art_server(self) -> NotFound:
        return NotFound(
            f"{self.where} has no such route: it is no art-server, an older one, or `art view`, which has no jobs",
            code="no_server",
        )


Source: TypeAlias = FolderSource | HttpSource
