"""An agent that asks, on a ledger without an engine, and is told what the test says; and what a session makes of it."""

import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art_protocol.wire import SessionReply
from art_server.ledger import conversation
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Request
from art_server.ledger.sessions import read_session
from art_server.shared import clock
from art_server.shared.engine_messages import FinishedChoice

OWNER = "the owner of the key"

USER = {"role": "user", "content": "q"}


class Agent:
    """Asks, and is told what the test says."""

    def __init__(self, path: Path, project: str = "p"):
        self.ledger = Ledger(path / "l.sqlite")
        self.project = project
        self._numbers = itertools.count(1 if project == "p" else 1000)

    def ask(
        self,
        messages: list[dict[str, Any]],
        said: str,
        delivered: bool = True,
        received: dict[str, Any] | None = None,
        unseen: str | None = None,
        at: int | None = None,
        constraints: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        stops: Sequence[str] = (),
        model: str | None = "a",
        session: str | None = "s",
        step: int | None = None,
        finish: str = "stop",
    ) -> None:
        """`at` is the time of the request; the answer is delivered at once. `model` None is the base model. `step` is the step that the
        request names."""
        request_id = f"{next(self._numbers):032x}"
        before = conversation.prefix_digests(messages)[-1]
        request = Request(
            request_id,
            "chat",
            model=self.number(model) if model else None,
            step=(step or 0) if model else None,
            owner=self.project if model else OWNER,
            session=session,
            prefix_digest=before,
            requested_at=clock.tick() if at is None else at,
        )
        with self.ledger.open_request(request):
            self.ledger.take_prompt(request_id, 0, [1, 2])
            sample = FinishedChoice("x", 0, said, [3], [-1.0], finish, None, {"n": 1})
            self.ledger.take_samples([(request_id, 0, 0, sample)])
            if unseen is not None:
                sample = FinishedChoice("x", 1, unseen, [4], [-1.0], "stop", None, {"n": 2})
                self.ledger.take_samples([(request_id, 1, 0, sample)])
        choice = {
            "index": 0,
            "finish_reason": finish,
            "message": received or {"role": "assistant", "content": said},
            "art": {"id": f"{request_id}-0"},
        }
        turn = {
            "messages": messages,
            "tools": tools,
            "constraints": constraints or {},
            "stops": stops,
            "choices": {"0": choice},
            "names_step": step is not None,
        }
        self.ledger.keep_turn(request_id, turn)
        if delivered:
            self.ledger.mark_delivered(request_id)

    def reply(self, model: str = "a") -> SessionReply:
        """As the server's route makes it."""
        return read_session(self.ledger, self.number(model), self.project, "s", OWNER)

    def number(self, model: str) -> int:
        """The number of a model of the agent's project."""
        return zlib.crc32(f"{self.project}/{model}".encode())


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def shape(reply: SessionReply) -> list[str]:
    """Each conversation as its roles, choices written in capitals."""
    return [
        "".join("C" if "finish_reason" in e else e["role"][0] for e in h.messages_and_choices) for h in reply.histories
    ]


def answers(reply: SessionReply) -> list[list[str]]:
    """The trained answers of each conversation."""
    return [[e["message"]["content"] for e in h.messages_and_choices if "finish_reason" in e] for h in reply.histories]
