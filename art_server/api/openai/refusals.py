"""vLLM's errors: refusals of requests in sentences that name fields of the request, and the shape of Anthropic's API."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from art_server.api.error_responses import MAX_FIELDS_SHOWN, as_anthropic, field_path
from art_server.api.openai.grammar_limits import name_grammar
from art_server.inference_proxy import InferenceRequest

INVALID = re.compile(rb"\d+ validation errors?:")
PROBLEM = re.compile(r"""'loc': '(?:body\.)?([^']*)', 'msg': (?:'((?:[^'\\]|\\.)*)'|"([^"]*)")""")
"""Of vLLM's message about an invalid body: the path of a field, and what is wrong."""
CLASS = re.compile(r"[A-Z]\w*")
"""A part of a path that names a class of vLLM's, for fields of several types."""


VLLMS_TYPE, ANTHROPICS_TYPE = b'"error":{"type":"internal_error"', b'"error":{"type":"api_error"'
"""Of an error in a stream of /v1/messages. Quotes inside a text are escaped, so no text can match."""


def refusal_of(content: bytes, status: int, inference: InferenceRequest) -> bytes:
    """The body of vLLM's answer with an error."""
    content = in_words(content, inference.body)
    if inference.api != "messages":
        return content
    return msgspec.json.encode(as_anthropic(msgspec.json.decode(content), status))


def in_words(content: bytes, body: Mapping[str, Any]) -> bytes:
    """vLLM's refusal of a request, with the names of fields."""
    content = name_grammar(content, body)
    if not INVALID.search(content):
        return content
    answer = msgspec.json.decode(content)
    problems: dict[str, str] = {}
    for path, *messages in PROBLEM.findall(str(answer["error"]["message"])):
        parts = [part for part in path.split(".") if not CLASS.fullmatch(part)]
        field = field_path(tuple(int(part) if part.isdecimal() else part for part in parts))
        problems.setdefault(field, "".join(messages))
    if not problems:
        return content
    shown = [f"{field}: {message}" for field, message in list(problems.items())[:MAX_FIELDS_SHOWN]]
    answer["error"]["message"] = f"the request is invalid: {'; '.join(shown)}"
    answer["error"]["param"] = next(iter(problems))
    return msgspec.json.encode(answer)
