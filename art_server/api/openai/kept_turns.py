"""What the ledger keeps of an answer beside the records of its choices: the request's messages, the turn of a session, and who made a
tool call.

Whole answers (`answers.py`) and streams (`streaming.py`) keep the same.
"""

import re
from typing import Any

from art_server.api.openai.grammar_limits import FIELDS
from art_server.inference_proxy import InferenceRequest
from art_server.ledger import conversation
from art_server.ledger.ledger import OpenRequest
from art_server.ledger.records import choice_id

CALL_ID = re.compile(rb'"(?:call_id|id)": ?"([^"]*(?:call|tool)[^"]*)"')
"""The id of a tool call, as the APIs write it. Messages and responses have ids, too, but without "call" and "tool". The ids are
found in the bytes, because most events of a stream are not decoded. Quotes inside a text are escaped, so no text can match."""


def name_calls(content: bytes, opened: OpenRequest, index: int) -> None:
    """Stores in the ledger which choice made the tool calls of an answer, or of a stream's events. A later request with the ids of
    these calls continues this choice, not another with the same text."""
    if call_ids := CALL_ID.findall(content):
        choice = choice_id(opened.request.request_id, index)
        opened.ledger.name_calls(choice, [call_id.decode() for call_id in call_ids])


def keep_turn(inference: InferenceRequest, opened: OpenRequest, choices: dict[int, dict[str, Any]]) -> None:
    """Stores a request's messages and, for a session, its choices as the agent receives them. `choices` holds
    choices that are already built; the others are built from the sampled text.

    A record has tokens, but a session's trajectory has messages (`ledger/sessions.py`). Tools and constraints tell the same
    request, asked again, from another request with the same messages; stop strings tell where an answer was cut."""
    inference.num_ended = len(opened.records) + len(opened.lost)
    if not inference.keeps_messages or not opened.records:
        return
    tools = inference.body.get("tools")
    asked = {"messages": inference.conversation.messages, "tools": tools if isinstance(tools, list) else None}
    if inference.session is None:
        opened.ledger.keep_turn(opened.request.request_id, asked)
        return
    kept: dict[str, dict[str, Any]] = {}
    for index, record in opened.records.items():
        choice = choices.get(index)
        if choice is None:
            choice = {"message": conversation.message_from(record.text), "finish_reason": record.finish_reason}
        kept[str(index)] = {
            "index": index,
            "finish_reason": choice["finish_reason"],
            "message": {key: value for key, value in choice["message"].items() if value is not None},
            "art": inference.art_field(opened, index),
        }
    turn = {
        **asked,
        "constraints": {name: inference.body[name] for name in FIELDS if name != "tools" and name in inference.body},
        "stops": conversation.stops_of(inference.api, inference.body),
        "choices": kept,
        "names_step": inference.names_step,
    }
    opened.ledger.keep_turn(opened.request.request_id, turn)
