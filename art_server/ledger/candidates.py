"""Finds the recorded choices that a request may continue, by what identifies them.

First come the choices that the request's messages repeat: by an id in a message, or by the digest of the conversation before
the message. They are choices of the request's session or, without a session, of all requests to the model. Then come the
choices of an earlier response that the request names, and the other choices of its session, because an agent may change
messages in ways that are not rendered.
"""

import sqlite3
from collections.abc import Callable, Iterator

from art_server.ledger.conversation import PastAnswer
from art_server.ledger.records import Request
from art_server.ledger.storage import Storage

MAX_TRIED = 32
"""Groups of choices that are compared with a prompt, nearest first."""


class Candidates:
    """The choices that one request may continue."""

    def __init__(self, storage: Storage, request: Request):
        self._storage = storage
        self._request = request
        names = {name for answer in request.answers for name in answer.ids}
        self._cited = storage.find_cited(request, names | set(request.cited_choices))
        self._of_session = storage.find_of_session(request)

    def own(self, answer: PastAnswer) -> sqlite3.Row | None:
        """The choice that a message certainly repeats, though the message may be edited: the choice of an id in the message, or
        the session's newest choice with the message's digests."""
        rows = self._named(answer)
        if self._request.session is not None:
            rows += self._repeated(answer)
        return rows[0] if rows else None

    def groups(self, read: Callable[[sqlite3.Row], bytes | None]) -> Iterator[tuple[list[sqlite3.Row], bool]]:
        """Groups of choices in the order in which they are tried, and whether a message repeats the group. The choices of a
        group have the same text and are newest first. `read` gives the digest of the text that is rendered behind a choice's
        prompt."""
        cited = {row["choice_id"] for row in self._cited.values()}
        for answer in reversed(self._request.answers):
            for row in self._named(answer):
                yield [row], True
            repeated = self._repeated(answer) or self._rendered(answer, read)
            # An answer without ids continues an answer with ids: choices that continue a cited choice come first.
            mine = [row for row in repeated if row["continues"] in cited]
            for group in (mine, [row for row in repeated if row not in mine]):
                if group:
                    yield group, True
        for name in self._request.cited_choices:
            if name in self._cited:
                yield [self._cited[name]], False
        for row in self._of_session:
            yield [row], False

    def _named(self, answer: PastAnswer) -> list[sqlite3.Row]:
        """The choices that made the ids in a message."""
        named: dict[str, sqlite3.Row] = {}
        for name in answer.ids:
            if name in self._cited:
                row = self._cited[name]
                named[row["choice_id"]] = row
        return list(named.values())

    def _repeated(self, answer: PastAnswer) -> list[sqlite3.Row]:
        """The choices with the digests of a message and of the conversation before it, newest first."""
        if self._request.session is None:
            return [
                row
                for digest in answer.digests
                for row in self._storage.find_answers(self._request, answer.prefix_digest, digest)
            ]
        repeated: list[sqlite3.Row] = []
        for row in self._of_session:
            if row["prefix_digest"] == answer.prefix_digest and row["answer_digest"] in answer.digests:
                repeated.append(row)
        return repeated

    def _rendered(self, answer: PastAnswer, read: Callable[[sqlite3.Row], bytes | None]) -> list[sqlite3.Row]:
        """For a request without a session: the choices that answered the conversation before a message, and whose text is
        rendered. The message that vLLM's parsers make of a text can have another digest; in gpt-oss' format it always has."""
        if self._request.session is not None:
            return []
        newest = self._storage.find_answers(self._request, answer.prefix_digest, None, limit=1)
        digest = read(newest[0]) if newest else None
        if digest is None:
            return []
        return self._storage.find_answers(self._request, answer.prefix_digest, digest)
