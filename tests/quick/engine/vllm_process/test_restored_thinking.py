"""vLLM reads the thinking that the server adds to a request, in each API, as it reads the agent's own."""

from typing import Any

import pytest

from art_server.ledger import conversation

CALL = {"name": "look", "arguments": '{"a": 1}'}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "fine", "reasoning": "own"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
            {"role": "assistant", "content": "done"},
        ]
    },
    "messages": {
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "own", "signature": "s"},
                    {"type": "text", "text": "fine"},
                ],
            },
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r"}]},
            {"role": "assistant", "content": "done"},
        ],
    },
    "responses": {
        "input": [
            {"role": "user", "content": "q"},
            {"type": "reasoning", "id": "rs_9", "summary": [], "content": [{"type": "reasoning_text", "text": "own"}]},
            {"role": "assistant", "content": "fine"},
            {"role": "user", "content": "more"},
            {"type": "function_call", "call_id": "c1", **CALL},
            {"type": "function_call_output", "call_id": "c1", "output": "r"},
            {"role": "assistant", "content": "done"},
        ]
    },
}
"""One conversation in three forms: an answer with its own thinking, a call and an answer without."""


def as_vllm_reads(api: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chat messages that vLLM makes of a body."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    body = {"model": "m", **body}
    if api == "chat":
        return body["messages"]
    if api == "messages":
        request = AnthropicMessagesRequest.model_validate(body)
        messages = AnthropicServingMessages.to_chat_completion_request(request).messages
    else:
        request_input = ResponsesRequest.model_validate(body).input
        messages = construct_input_messages(request_input=request_input)
    return [dict(message) for message in messages]


@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
@pytest.mark.parametrize("api", list(BODIES))
def test_thinking_is_added_where_the_agent_left_it_out(api: str) -> None:
    body = BODIES[api]
    _, answers = conversation.past_answers(conversation.messages_of(api, body))
    assert [answer.has_calls for answer in answers] == [False, True, False]
    assert [answer.ids for answer in answers] == [(), ("c1",), ()]
    restored = conversation.with_thinking(api, body, ["other", "plan", None])
    said = [message for message in as_vllm_reads(api, restored) if message["role"] == "assistant"]
    assert [message.get("reasoning") for message in said] == ["own", "plan", None]
    assert body == BODIES[api] and "plan" not in str(body), "the agent's body is unchanged"
    # Thinking changes no digest: the next request, which lacks it again, is the same conversation.
    messages = conversation.messages_of(api, restored)
    assert conversation.prefix_digests(messages)[-1] == conversation.past_answers(messages)[0]
    assert (
        conversation.past_answers(messages)[0] == conversation.prefix_digests(conversation.messages_of(api, body))[-1]
    )
