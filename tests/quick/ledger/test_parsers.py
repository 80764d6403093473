"""What vLLM's own parsers hand to an agent says what the recorded tokens say: whole, streamed, spelled oddly, cut off."""

import json
import warnings
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from art_server.ledger import conversation
from art_server.store.base_models import TINY_DIR
from tests.quick.ledger.spelled_tokens import spell

TOKENIZER: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(TINY_DIR)

words = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='<>{}|"\\'), max_size=12)
values = st.one_of(words, st.integers(-99, 99), st.booleans(), st.lists(words, max_size=2))
calls = st.lists(
    st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(words, values, max_size=3)),
    min_size=1,
    max_size=3,
)
cuts = st.lists(st.integers(0, 300), max_size=6)


@pytest.fixture(scope="module")
def parsing() -> Any:
    """vLLM's parser for the embedded model, and a request with tools."""
    with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    # Any: vLLM's types call fields required that have defaults, and do not know transformers' tokenizers.
    request_type = cast(Any, ChatCompletionRequest)
    request = request_type(messages=[{"role": "user", "content": "q"}], tools=[tool])
    kind = cast(Any, ToolParserManager.get_tool_parser("hermes"))
    return lambda: kind(TOKENIZER, request.tools), request


def written(content: str, called: list[tuple[str, dict[str, Any]]], ascii: bool) -> str:
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii) for name, arguments in called]
    return content + "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def streamed(parsing: Any, text: str, cuts: list[int]) -> dict[str, Any]:
    """The message of a stream whose deltas end at these cuts."""
    make, request = parsing
    parser = make()
    content, functions = "", {}
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})
    before = ""
    for end in ends:
        current = text[:end]
        if current == before:
            continue
        delta = parser.extract_tool_calls_streaming(before, current, current[len(before) :], [], [], [], request)
        before = current
        if delta is None:
            continue
        content += delta.content or ""
        for part in delta.tool_calls:
            function = functions.setdefault(part.index, {"name": "", "arguments": ""})
            function["name"] += part.function.name or ""
            function["arguments"] += part.function.arguments or ""
    tool_calls = [{"type": "function", "function": function} for function in functions.values()]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


@settings(deadline=None, max_examples=60)
@given(content=words, called=calls, ascii=st.booleans(), cuts=cuts, places=cuts, tail=words)
def test_what_a_parser_hands_on_says_what_was_sampled(
    parsing: Any,
    content: str,
    called: list[tuple[str, dict[str, Any]]],
    ascii: bool,
    cuts: list[int],
    places: list[int],
    tail: str,
) -> None:
    """The tokens of single and parallel calls, however they are spelled and whatever follows the calls."""
    text = written(content, called, ascii)
    ids = spell(TOKENIZER.backend_tokenizer, text + tail, cuts)
    decoded = cast(str, TOKENIZER.decode(ids, skip_special_tokens=True))  # of one sequence
    assert decoded == text + tail
    make, request = parsing
    parsed = make().extract_tool_calls(decoded, request)
    assert parsed.tools_called and len(parsed.tool_calls) == len(called)
    message = {
        "content": parsed.content,
        "tool_calls": [{"function": call.function.model_dump()} for call in parsed.tool_calls],
    }
    assert conversation.message_digest(message) == conversation.text_digest(decoded)
    assert conversation.message_digest(streamed(parsing, decoded, places)) == conversation.text_digest(decoded)


@settings(deadline=None, max_examples=60)
@given(called=calls, places=cuts, lost=st.integers(0, 40))
def test_a_streamed_call_that_was_cut_off_is_found_again(
    parsing: Any, called: list[tuple[str, dict[str, Any]]], places: list[int], lost: int
) -> None:
    whole = written("", called[:1], ascii=False)
    begun = whole.index('"arguments": ') + len('"arguments": ')
    text = whole[: max(begun, len(whole) - lost)]
    message = streamed(parsing, text, places)
    assert conversation.message_digest(message) == conversation.text_digest(text)
