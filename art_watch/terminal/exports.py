"""Reads files of scores: our own lines, and the exports of Langfuse and Open WebUI as they are.

A file is a JSON array, a page of Langfuse's API (`{"data": [...]}`), or an object on each line. Each row is told by its keys.

- Langfuse: https://github.com/langfuse/langfuse, fern/apis/server/definition (`commons.yml` `BaseScore`, `scores-v3.yml`); its files in a
  bucket have the same names with underscores.
- Open WebUI: https://github.com/open-webui/open-webui, backend/open_webui/models/feedbacks.py (`FeedbackModel`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from art_protocol.wire import NAME_PATTERN
from art_server.errors import UsageError

ANSWER = re.compile(r"(?:chatcmpl-|cmpl-|resp_)[0-9a-f]{32}(?:-\d{1,4})?|[0-9a-f]{32}-\d{1,4}")
"""The id of an answer of an art-server, or of a choice. A trace's id has 32 digits alone."""
MAX_ID = 200
NUMERIC, BOOLEAN = "NUMERIC", "BOOLEAN"
Row = Mapping[str, Any]


class ReadScore(NamedTuple):
    """A score of a file."""

    where: str
    """Its line or its number, for messages."""
    body: bytes | None
    """As `POST .../feedback` takes it; None: it cannot be sent."""
    reason: str | None = None
    """Why it cannot be sent."""


def read_scores(content: bytes) -> list[ReadScore]:
    """The scores of a file.

    Raises:
        UsageError: the file has no score.
    """
    scores = [read_row(where, row, text) for where, row, text in rows_of(content)]
    if not scores:
        raise UsageError("the file has no score: write a JSON object on each line")
    return scores


def rows_of(content: bytes) -> Iterator[tuple[str, object, bytes]]:
    """The rows of a file with their places. A line that is no JSON is a text."""
    try:
        whole = json.loads(content)
    except ValueError:
        whole = None
    listed = whole.get("data") if isinstance(whole, dict) else whole
    if isinstance(listed, list):
        for number, row in enumerate(listed, 1):
            yield f"score {number}", row, json.dumps(row).encode()
        return
    for number, line in enumerate(content.splitlines() if whole is None else [content], 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line), b" ".join(line.splitlines())
            except ValueError:
                yield f"line {number}", None, line


def read_row(where: str, row: object, text: bytes) -> ReadScore:
    """A row of any of the formats. Our own rows, and those of no format, go to the server as they are."""
    if not isinstance(row, dict):
        return ReadScore(where, text)
    try:
        if isinstance(row.get("data"), dict) and "user_id" in row and "meta" in row:
            body = from_open_webui(row)
        elif "answer" not in row and not LANGFUSE.isdisjoint(row):
            body = from_langfuse({camel(name): value for name, value in row.items()})
        else:
            return ReadScore(where, text)
    except ValueError as error:
        return ReadScore(where, None, str(error))
    return ReadScore(where, json.dumps({name: value for name, value in body.items() if value is not None}).encode())


LANGFUSE = {"traceId", "trace_id", "observationId", "observation_id", "dataType", "data_type", "subject"}
"""Keys of which a score of Langfuse has some, and ours none."""


def camel(name: str) -> str:
    """`trace_id -> traceId`"""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def from_langfuse(row: Row) -> dict[str, Any]:
    """A score of Langfuse: of an answer whose id it has, or of the session that its trace names.

    Raises:
        ValueError: the score has no number, or names nothing.
    """
    kind = row.get("dataType", NUMERIC)
    if kind not in (NUMERIC, BOOLEAN):
        raise ValueError(f"a score of type {kind} has no number: NUMERIC and BOOLEAN are read")
    value = row.get("value")
    if not isinstance(value, int | float):
        raise ValueError(f"value {value!r} is no number")
    metadata, trace, subject = (dict_of(row, name) for name in ("metadata", "trace", "subject"))
    ids = (row.get("observationId"), row.get("traceId"), subject.get("id"), subject.get("traceId"))
    answer = next((name for name in (metadata.get("answer"), *ids) if is_answer(name)), None)
    sessions = (
        metadata.get("session"),
        row.get("traceId"),
        subject.get("traceId"),
        subject.get("id"),
        row.get("sessionId"),
    )
    return {
        **judged(answer, sessions, "metadata.answer, its observation and its trace name no answer and no session"),
        "name": row.get("name"),
        "value": bool(value) if kind == BOOLEAN else value,
        "comment": row.get("comment") or None,
        "user": metadata.get("user") or trace.get("userId") or row.get("authorUserId"),
        "id": version_id(row.get("id"), row.get("updatedAt") or row.get("timestamp")),
    }


def from_open_webui(row: Row) -> dict[str, Any]:
    """A rating of Open WebUI: of an answer whose id it has, or of the session that its message names.

    Raises:
        ValueError: the rating is withdrawn, or names nothing.
    """
    data, meta = dict_of(row, "data"), dict_of(row, "meta")
    if data.get("rating") not in (1, -1, "1", "-1"):
        raise ValueError(f"rating {data.get('rating')!r}: a thumb is 1 or -1")
    ids = (meta.get("answer"), meta.get("message_id"))
    answer = next((name for name in ids if is_answer(name)), None)
    texts = [str(data[name]) for name in ("reason", "comment") if data.get(name)]
    return {
        **judged(answer, (meta.get("message_id"),), "meta.message_id names no answer and no session"),
        "value": int(data["rating"]) > 0,
        "comment": ": ".join(texts) or None,
        "user": row["user_id"],
        "id": version_id(row.get("id"), row.get("updated_at")),
    }


def dict_of(row: Row, name: str) -> Row:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def is_answer(name: object) -> bool:
    return isinstance(name, str) and ANSWER.fullmatch(name) is not None


def judged(answer: str | None, sessions: tuple[object, ...], reason: str) -> dict[str, str]:
    """What a score judges: the answer, or else the first session.

    Raises:
        ValueError: there is neither.
    """
    if answer is not None:
        return {"answer": answer}
    for session in sessions:
        if isinstance(session, str) and re.fullmatch(NAME_PATTERN, session):
            return {"session": session}
    raise ValueError(reason)


def version_id(name: object, changed_at: object) -> str | None:
    """The id of a score at a time: the same row sent again is the same score, a changed row replaces it."""
    return None if name is None else " ".join(str(part) for part in (name, changed_at) if part is not None)[:MAX_ID]
