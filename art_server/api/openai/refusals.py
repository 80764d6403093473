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


OUTPUT_LIMIT = re.compile(r"max_\w+=(\d+) cannot be greater than max_model_len=(\d+)")
"""vLLM's refusal of an answer that could be longer than the context."""
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LONG_PROMPT = re.compile(
    r"maximum context length is (\d+) tokens\. However, your prompt contains (?:at least )?(\d+) (\w+)"
)
"""vLLM's refusal of a prompt that is longer than the context. vLLM does not always count to the prompt's end."""


def refusal_of(content: bytes, status: int, inference: InferenceRequest) -> bytes:
    """The body of vLLM's answer with an error."""
    content = of_lengths(in_words(content, inference.body), inference)
    if inference.api != "messages":
        return content
    return msgspec.json.encode(as_anthropic(msgspec.json.decode(content), status))


def of_lengths(content: bytes, inference: InferenceRequest) -> bytes:
    """A refusal because of a length with both numbers and the remedy. Claude Code compacts the conversation if it reads Anthropic's
    sentence ("prompt is too long"), other agents if they read OpenAI's, which vLLM has, or OpenAI's code."""
    if b"max_model_len=" not in content and b"maximum context length" not in content:
        return content
    answer = msgspec.json.decode(content)
    error = answer["error"]
    if match := OUTPUT_LIMIT.search(error["message"]):
        field = next((name for name in LIMIT_FIELDS if name in inference.body), LIMIT_FIELDS[0])
        error["message"] = (
            f"{field}: {match[1]} > {match[2]}, the tokens of this server's context, which prompt and answer share: lower the agent's "
            "limit (Claude Code: CLAUDE_CODE_MAX_OUTPUT_TOKENS; opencode: limit.output; pi: maxTokens) or set it with "
            "art.rollout(..., sampling={'max_tokens': N}), or start the server with a longer --max-seq-length"
        )
        error |= {"code": "max_tokens_too_large", "param": field}
    elif match := LONG_PROMPT.search(error["message"]):
        if inference.api == "messages":
            context, length, unit = match.groups()
            said = f"{length} tokens > {context}" if unit == "input" else f"{length} {unit} > {context} tokens"
            error["message"] = f"prompt is too long: {said} maximum, the context of this server"
        error["code"] = "context_length_exceeded"
    return msgspec.json.encode(answer)


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
