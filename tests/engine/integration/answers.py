"""Requests of several files, and how their answers and records are read."""

import json
import sqlite3
from contextlib import closing
from typing import Any

from tokenizers import Tokenizer

from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Record
from art_server.store.base_models import TINY_DIR
from tests.live import PROJECT, Server

TOKENIZER = Tokenizer.from_file(str(TINY_DIR / "tokenizer.json"))
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def number_of(server: Server, name: str) -> int:
    """The number of a model, read from the database of the running server."""
    with closing(sqlite3.connect(server.path / "art" / ".server" / "server.sqlite")) as database:
        query = "SELECT model FROM models WHERE project = ? AND name = ? AND NOT is_deleted"
        ((number,),) = database.execute(query, (PROJECT, name)).fetchall()
        return number


def records_of(server: Server, request_id: str) -> list[Record]:
    """The records of a request, read from the ledger file of the running server."""
    with closing(Ledger(server.path / "art" / ".server" / "ledger.sqlite")) as ledger:
        records: list[Record] = []
        while (record := ledger.find(f"{request_id}-{len(records)}")) is not None:
            records.append(record)
        return records


def sse_data(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def session_records(server: Server, session: str, name: str = "exact") -> list[Record]:
    """The records of a session, read from the ledger file of the running server."""
    with closing(Ledger(server.path / "art" / ".server" / "ledger.sqlite")) as ledger:
        headings = ledger.find_session(number_of(server, name), session)
        records = [ledger.find(heading.choice_id) for heading, _ in headings]
        return [record for record in records if record is not None]


def post(server: Server, api: str, body: dict[str, Any], session: str) -> dict[str, Any]:
    """An answer of one of the APIs: its last event, or the whole body."""
    paths = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
    path = paths.get(api, "/v1/completions")
    with server.client() as client:
        response = client.post(f"/s/{session}{path}", json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    events = sse_data(response.text)
    if api == "responses":
        return events[-1]["response"]
    if api == "messages":
        text = "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
        return {"content": [{"type": "text", "text": text}]}
    if api == "chat":
        text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
        return {"choices": [{"message": {"role": "assistant", "content": text}}]}
    return {"choices": [{"text": "".join(c["text"] for e in events for c in e["choices"])}]}


def ask(server: Server, api: str, model: str, turns: list[Any], stream: bool, session: str) -> str:
    """Adds one turn to a conversation; `turns` has the API's own form. Returns the answer's text."""
    common = {"model": model, "stream": stream, "temperature": 1.0}
    if api == "completions":
        body = common | {"prompt": "".join(turns), "max_tokens": 6}
        said = post(server, api, body, session)["choices"][0]["text"]
        turns += [said, " and"]
        return said
    turns.append({"role": "user", "content": "respond with yes, no, maybe"})
    if api == "chat":
        body = common | {"messages": turns, "max_tokens": 6}
        message = post(server, api, body, session)["choices"][0]["message"]
        said = message["content"]
        turns.append({"role": "assistant", "content": said})
    elif api == "messages":
        body = common | {"messages": turns, "max_tokens": 6}
        blocks = post(server, api, body, session)["content"]
        said = "".join(block["text"] for block in blocks)
        turns.append({"role": "assistant", "content": said})
    else:
        body = common | {"input": turns, "max_output_tokens": 6}
        output = post(server, api, body, session)["output"]
        said = "".join(part["text"] for item in output for part in item.get("content") or ())
        turns.append({"role": "assistant", "content": said})
    return said


def has_one_whole_call(message: dict[str, Any]) -> bool:
    """Whether the message has one complete call. The tiny model's calls may be invalid JSON or cut off."""
    calls = message.get("tool_calls") or []
    try:
        return len(calls) == 1 and isinstance(json.loads(calls[0]["function"]["arguments"]), dict)
    except ValueError:
        return False
