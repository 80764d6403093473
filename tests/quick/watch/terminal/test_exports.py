"""The exports of Langfuse and Open WebUI become scores; what names no answer is listed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from art_server.errors import UsageError
from art_watch.terminal.cli import main as art
from art_watch.terminal.exports import read_scores
from tests.quick.learning.crowd import NAME, crowd

RID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACE = "0af7651916cd43dd8448eb211c80319c"
ANSWER = f"chatcmpl-{RID}"
MESSAGE = "9f1c2b34-5d6e-4f70-8a91-b2c3d4e5f607"
LANGFUSE = {
    "id": "s1",
    "traceId": TRACE,
    "observationId": None,
    "name": "thumb",
    "source": "API",
    "dataType": "NUMERIC",
    "value": 0.5,
    "comment": "",
    "timestamp": "2026-11-30T10:00:00.000Z",
    "updatedAt": "2026-11-30T10:05:00.000Z",
    "authorUserId": None,
}
SNAKE = {
    "id": "s1",
    "project_id": "p",
    "trace_id": TRACE,
    "observation_id": ANSWER,
    "name": "thumb",
    "value": 1.0,
    "data_type": "BOOLEAN",
    "string_value": "True",
    "comment": "right",
    "updated_at": "2026-11-30 10:05:00.000",
}
V3 = {
    "id": "s1",
    "name": "thumb",
    "dataType": "BOOLEAN",
    "value": False,
    "subject": {"kind": "observation", "id": "a1b2c3d4e5f60718", "traceId": TRACE},
}
OPEN_WEBUI = {
    "id": "f1",
    "user_id": "u17",
    "version": 0,
    "type": "rating",
    "data": {"rating": 1, "model_id": "shop/helper", "reason": "accurate_information", "comment": "thanks"},
    "meta": {"chat_id": "c1", "message_id": MESSAGE, "model_id": "shop/helper", "arena": False},
    "snapshot": {"chat": {"id": "c1", "chat": {"history": {}}}},
    "created_at": 1764400000,
    "updated_at": 1764400005,
}
CHANGED = "2026-11-30T10:05:00.000Z"
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a trace is a session": (LANGFUSE, {"session": TRACE, "name": "thumb", "value": 0.5, "id": f"s1 {CHANGED}"}),
    "the trace is named by the answer": (
        LANGFUSE | {"traceId": ANSWER},
        {"answer": ANSWER, "name": "thumb", "value": 0.5, "id": f"s1 {CHANGED}"},
    ),
    "metadata names the answer": (
        LANGFUSE | {"metadata": {"answer": ANSWER, "user": "u1"}},
        {"answer": ANSWER, "name": "thumb", "value": 0.5, "user": "u1", "id": f"s1 {CHANGED}"},
    ),
    "the user of the trace": (
        LANGFUSE | {"trace": {"userId": "u2"}},
        {"session": TRACE, "name": "thumb", "value": 0.5, "user": "u2", "id": f"s1 {CHANGED}"},
    ),
    "a score of a session": (
        LANGFUSE | {"traceId": None, "sessionId": "order-52"},
        {"session": "order-52", "name": "thumb", "value": 0.5, "id": f"s1 {CHANGED}"},
    ),
    "a file of a bucket": (
        SNAKE,
        {"answer": ANSWER, "name": "thumb", "value": True, "comment": "right", "id": "s1 2026-11-30 10:05:00.000"},
    ),
    "the third version of the API": (V3, {"session": TRACE, "name": "thumb", "value": False, "id": "s1"}),
    "a thumb of Open WebUI": (
        OPEN_WEBUI,
        {
            "session": MESSAGE,
            "value": True,
            "comment": "accurate_information: thanks",
            "user": "u17",
            "id": "f1 1764400005",
        },
    ),
    "a thumb down without a reason": (
        OPEN_WEBUI | {"data": {"rating": -1, "reason": None}, "meta": {"message_id": ANSWER}},
        {"answer": ANSWER, "value": False, "user": "u17", "id": "f1 1764400005"},
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a category": (
        LANGFUSE | {"dataType": "CATEGORICAL", "value": "good"},
        "a score of type CATEGORICAL has no number",
    ),
    "no number": (LANGFUSE | {"value": "0.5"}, "value '0.5' is no number"),
    "nothing is named": (LANGFUSE | {"traceId": None}, "name no answer and no session"),
    "a name with spaces": (LANGFUSE | {"traceId": "my trace"}, "name no answer and no session"),
    "a withdrawn thumb": (OPEN_WEBUI | {"data": {"rating": None}}, "rating None: a thumb is 1 or -1"),
    "a chat without a message": (OPEN_WEBUI | {"meta": {"chat_id": "c1"}}, "meta.message_id names no answer"),
}


@pytest.mark.parametrize("case", READ)
def test_a_row_of_another_tool_becomes_a_score(case: str) -> None:
    row, body = READ[case]
    forms = [json.dumps([row]), json.dumps({"data": [row], "meta": {"page": 1}}), f"{json.dumps(row)}\n" * 2]
    for form in forms:
        assert {score.body for score in read_scores(form.encode())} == {json.dumps(body).encode()}


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_that_is_no_score_of_an_answer_says_why(case: str) -> None:
    row, reason = REFUSED[case]
    (score,) = read_scores(json.dumps(row).encode())
    assert score.body is None and reason in (score.reason or "")


def test_our_own_lines_stay_as_they_are() -> None:
    own = json.dumps({"answer": ANSWER, "value": 1, "metadata": {"session": "s"}})
    scores = read_scores(f"{own}\n\n{{\n{own}".encode())
    assert [(score.where, score.body) for score in scores] == [
        ("line 1", own.encode()),
        ("line 3", b"{"),
        ("line 4", own.encode()),
    ]
    with pytest.raises(UsageError, match="has no score"):
        read_scores(b"\n")


@pytest.mark.anyio
async def test_exports_are_sent_and_sent_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with crowd(tmp_path / "art") as shop:
        answer = await shop.answer()
        messages = [{"role": "user", "content": "hello"}]
        headers = {"x-art-session": MESSAGE}
        await shop.http.post("/v1/chat/completions", json={"model": NAME, "messages": messages}, headers=headers)
        file = tmp_path / "export.json"
        rows = [
            LANGFUSE | {"metadata": {"answer": answer}},
            OPEN_WEBUI,
            LANGFUSE | {"id": "s2"},
            REFUSED["a category"][0],
        ]

        async def send() -> str:
            file.write_text(json.dumps(rows))
            with pytest.raises(SystemExit):
                await asyncio.to_thread(art, ["feedback", str(file), "--model", NAME, "--url", shop.served.url])
            out, err = capsys.readouterr()
            assert "2 of 4 scores taken" in out
            assert f"score 3: session '{TRACE}' has no answer of '{NAME}'" in err
            return err

        assert "score 4: a score of type CATEGORICAL has no number" in await send()
        await send()
        assert [(score["value"], score["state"]) for score in await shop.scores()] == [(0.5, "scored"), (1, "scored")]
        rows[1] = OPEN_WEBUI | {"data": {"rating": -1}, "updated_at": 1764400009}
        await send()
        assert [score["state"] for score in await shop.scores()] == ["scored", "replaced", "scored"]
