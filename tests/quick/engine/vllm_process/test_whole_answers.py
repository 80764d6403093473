"""A stream says what the whole answer says: vLLM's own serving code with our parsers, on texts that a test writes."""

import asyncio
import functools
import importlib
import itertools
import json
import logging
import os
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from art_server.store.base_models import TINY_DIR

EXAMPLES = int(os.environ.get("STREAM_EXAMPLES", "15"))
"""Outputs for each parser; `STREAM_EXAMPLES=2000` for a thorough run."""
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
J = '{"name": "look", "arguments": {"city": "Paris", "days": 3}}'
SWAPPED = '{"arguments": {"days": 3, "city": "Paris"}, "name": "look"}'
LLAMA = '{"name": "look", "parameters": {"city": "Paris"}}'
XML = "<tool_call>\n<function=look>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
HY = "<tool_calls><tool_call>look<tool_sep><arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call></tool_calls>"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK_31 = DEEPSEEK.replace("function<｜tool▁sep｜>look\n```json\n", "look<｜tool▁sep｜>").replace("\n```", "")
GEMMA = '<|tool_call>call:look{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Paris</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
SEED = "<seed:tool_call>\n<function=look>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>"
FUNCTION = "<start_function_call>call:look{city:<escape>Paris<escape>}<end_function_call>"
MISTRAL = '[TOOL_CALLS]look[ARGS]{"city": "Paris"}'
MUSE = (
    "<|start|>assistant to=tools<|message|><atem:function_calls>\n"
    '<atem:invoke name="look">\n<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls><|eom|>"
)
PYTHONIC = 'look(city="Paris", days=3)'
TOOLS_TAG = f"[{J}, {J}]"


def twice(text: str, begin: str, end: str) -> str:
    """A block with its call from `begin` to `end` two times."""
    before, _, behind = text.partition(begin)
    call, _, after = behind.partition(end)
    return before + 2 * f"{begin}{call}{end}" + after


class Case(NamedTuple):
    """A pair of parsers that the server chooses, and its family's marks."""

    tool: str
    reasoning: str | None
    calls: tuple[str, ...]
    marks: tuple[str, ...]
    think: tuple[str, str] = ("<think>", "</think>")
    thinks: bool | None = None
    """The argument `enable_thinking` of its template."""
    answer: str = "{}"
    """What the family writes around an answer after thinking."""
    effort: str | None = None
    """The argument `reasoning_effort` of its template."""

    @property
    def kwargs(self) -> dict[str, Any]:
        told = {"enable_thinking": self.thinks, "reasoning_effort": self.effort}
        return {name: value for name, value in told.items() if value is not None}


HERMES = ("<tool_call>", "</tool_call>", "<tool", '{"name": "look", ', '"arguments": {')
HERMES_CALL = f"<tool_call>\n{J}\n</tool_call>"
HERMES_CALLS = (HERMES_CALL, f"<tool_call>{SWAPPED}</tool_call>", f"{HERMES_CALL}\n{HERMES_CALL}")
XML_MARKS = ("<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=city>")
CASES = {
    "hermes": Case("hermes", None, HERMES_CALLS, HERMES),
    "hermes-qwen3": Case("hermes", "qwen3", HERMES_CALLS, HERMES),
    "hermes-qwen3-on": Case("hermes", "qwen3", HERMES_CALLS, HERMES, thinks=True),
    "hermes-qwen3-off": Case("hermes", "qwen3", HERMES_CALLS, HERMES, thinks=False),
    "qwen3_xml": Case("qwen3_xml", None, (XML, f"{XML}\n{XML}"), XML_MARKS),
    "qwen3_xml-qwen3": Case("qwen3_xml", "qwen3", (XML, f"{XML}\n{XML}"), XML_MARKS),
    "llama3_json": Case("llama3_json", None, (LLAMA, f"<|python_tag|>{LLAMA}; {J}"), ("<|python_tag|>", "; ", "{")),
    "llama4_pythonic": Case(
        "llama4_pythonic",
        None,
        ('[look(city="Paris", days=3), look(days=1)]', "<|python_start|>[look()]<|python_end|>"),
        ("[", "]", "<|python_start|>", "look(", ")"),
    ),
    "mistral": Case("mistral", None, (MISTRAL, 2 * MISTRAL), ("[TOOL_CALLS]", "[ARGS]", "[TOOL", f"[{J}, ")),
    "deepseek_v3": Case(
        "deepseek_v3",
        "deepseek_r1",
        (DEEPSEEK, twice(DEEPSEEK, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    "gemma4": Case(
        "gemma4",
        "gemma4",
        (GEMMA, 2 * GEMMA),
        ("<|tool_call>", "<tool_call|>", '<|"|>', "thought\n", "call:look{"),
        ("<|channel>", "<channel|>"),
    ),
    "glm45": Case("glm45", "glm45", (GLM, f"{GLM}\n{GLM}"), ("<tool_call>", "<arg_key>", "</arg_value>")),
    "kimi_k2": Case(
        "kimi_k2",
        "kimi_k2",
        (KIMI, twice(KIMI, "<|tool_call_begin|>", "<|tool_call_end|>")),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "minimax_m2": Case(
        "minimax_m2",
        "minimax_m2",
        (MINIMAX, twice(MINIMAX, "<invoke", "</invoke>\n")),
        ("<minimax:tool_call>", '<invoke name="look">'),
    ),
    "seed_oss": Case(
        "seed_oss",
        "seed_oss",
        (SEED, f"{SEED}\n{SEED}"),
        ("<seed:tool_call>", "</seed:tool_call>", "<function=look>"),
        ("<seed:think>", "</seed:think>"),
        thinks=True,
    ),
    "lfm2": Case(
        "lfm2",
        "qwen3",
        (f"<|tool_call_start|>[{PYTHONIC}, {PYTHONIC}]<|tool_call_end|>",),
        ("<|tool_call_start|>", "[look(", ")]", "<|tool_call_end|>"),
    ),
    "deepseek_v31": Case(
        "deepseek_v31",
        "deepseek_v3",
        (DEEPSEEK_31, twice(DEEPSEEK_31, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        thinks=True,
    ),
    "functiongemma": Case(
        "functiongemma",
        None,
        (FUNCTION, 2 * FUNCTION),
        ("<start_function_call>", "<escape>", "call:look{", "<end_function_call>"),
    ),
    "magistral": Case(
        "mistral", "mistral", (MISTRAL, 2 * MISTRAL), ("[TOOL_CALLS]", "[ARGS]", "[TOOL"), ("[THINK]", "[/THINK]")
    ),
    "laguna": Case(
        "poolside_v1", "poolside_v1", (GLM, f"{GLM}\n{GLM}"), ("<tool_call>", "<arg_key>", "</arg_value>"), thinks=True
    ),
    "olmo3": Case(
        "olmo3",
        "olmo3",
        (f"<function_calls>\n{PYTHONIC}\n{PYTHONIC}\n</function_calls>",),
        ("<function_calls>", "</function_calls>", "look("),
    ),
    "granite": Case(
        "granite",
        "granite",
        (f"<|tool_call|>{TOOLS_TAG}",),
        ("<|tool_call|>", "[{", "Here is my"),
        ("Here is my thought process:", "Here is my response:"),
    ),
    "apertus": Case(
        "apertus",
        None,
        ('<|tools_prefix|>[{"look": {"city": "Paris"}}, {"look": {"days": 3}}]<|tools_suffix|>',),
        ("<|tools_prefix|>", '[{"look": ', "<|tools_suffix|>"),
    ),
    "phi4_mini_json": Case("phi4_mini_json", None, (f"functools{TOOLS_TAG}",), ("functools", "[{", "}]")),
    "hunyuan_a13b": Case(
        "hunyuan_a13b",
        "hunyuan_a13b",
        (f"<tool_calls>{TOOLS_TAG}</tool_calls>",),
        ("<tool_calls>", "</tool_calls>", "<answer>\n", "\n</answer>"),
        ("<think>\n", "\n</think>\n"),
        answer="<answer>\n{}\n</answer>",
    ),
    "ernie45": Case(
        "ernie45",
        "ernie45",
        (f"{HERMES_CALL}\n", f"{HERMES_CALL}\n{HERMES_CALL}\n"),
        ("<tool_call>", "</tool_call>", "<response>\n", "\n</response>\n"),
        answer="<response>\n{}\n</response>\n",
    ),
    "hy_v3": Case(
        "hy_v3",
        None,
        (HY, twice(HY, "<tool_call>", "</tool_call>")),
        ("<tool_calls>", "<tool_sep>", "<arg_key>", "</arg_value>"),
    ),
    "hy_v3-thinks": Case(
        "hy_v3",
        "hy_v3",
        (HY, twice(HY, "<tool_call>", "</tool_call>")),
        ("<tool_calls>", "<tool_sep>", "<arg_key>", "</arg_value>"),
        effort="high",
    ),
    "lfm2-silent": Case(
        "lfm2",
        None,
        (f"<|tool_call_start|>[{PYTHONIC}]<|tool_call_end|>",),
        ("<|tool_call_start|>", "<|tool_call_end|>", "look("),
    ),
    "llama3_json-qwen3": Case("llama3_json", "qwen3", (LLAMA, f"<|python_tag|>{LLAMA}; {J}"), ("<|python_tag|>", "; ")),
    "muse_glimmer": Case(
        "muse_glimmer",
        "muse_glimmer",
        (MUSE, 2 * MUSE),
        ("<|start|>assistant", " to=tools", "<|message|>", "<|eom|>", "<atem:function_calls>"),
        (" to=self<|message|>", "<|eom|>"),
        answer="<|start|>assistant to=user<|message|>{}",
    ),
    "nemotron_v3": Case("qwen3_coder", "nemotron_v3", (XML, f"{XML}\n{XML}"), XML_MARKS, thinks=True),
}
PROSE = ("I will look. ", "\n\n", " ", "ünï ☃ 🙂", "a < b", "x[0] = {1}", "```json\n", '"', "\\ud83c", "}")
SPECIAL = [
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<seed:think>",
    "</seed:think>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<｜tool▁sep｜>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<function_calls>",
    "</function_calls>",
    "<|tool_call|>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<tool_calls>",
    "</tool_calls>",
    "<tool_sep>",
    "<answer>",
    "</answer>",
    "<response>",
    "</response>",
    "<assistant>",
    "</assistant>",
]


@pytest.fixture(scope="module")
def vllm() -> Any:
    """vLLM's modules, with our parsers and answers."""
    openai = "vllm.entrypoints.openai"
    names = {
        "chat": f"{openai}.chat_completion.serving",
        "chat_protocol": f"{openai}.chat_completion.protocol",
        "responses": f"{openai}.responses.serving",
        "responses_protocol": f"{openai}.responses.protocol",
        "context": f"{openai}.responses.context",
        "messages": "vllm.entrypoints.anthropic.serving",
        "outputs": "vllm.outputs",
        "detokenizer": "vllm.v1.engine.detokenizer",
        "abstract": "vllm.parser.abstract_parser",
        "metadata": "vllm.entrypoints.generate.base.protocol",
        "ours": "art_server.engine.vllm_process.whole_answers",
        "tokenizers": "vllm.tokenizers.hf",
        "transformers": "transformers",
    }
    with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
        modules = SimpleNamespace(**{key: importlib.import_module(n) for key, n in names.items()})
        modules.ours.install()
        tokenizer = modules.transformers.AutoTokenizer.from_pretrained(TINY_DIR)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(["Ġ</", "</", "think", ">"])  # OLMo's parser looks them up
    modules.tokenizer = modules.tokenizers.get_cached_tokenizer(tokenizer)
    return modules


@functools.cache
def parser_class(tool: str, reasoning: str | None) -> Any:
    """The class that vLLM gets from its manager, which `install` has changed."""
    return importlib.import_module("vllm.parser").ParserManager.get_parser(tool, reasoning, True)


class Output(NamedTuple):
    """A choice that the engine made."""

    text: str
    parts: tuple[str, ...]
    """The text as it came."""
    finish_reason: str
    stop_reason: str | None = None


async def results(vllm: Any, choices: Sequence[Output], prompt: list[int], streamed: bool) -> AsyncIterator[Any]:
    """The engine's outputs of a request with as many choices."""
    parts = [choice.parts if streamed else (choice.text,) for choice in choices]
    for step in range(max(map(len, parts))):
        outputs = []
        for index, (choice, texts) in enumerate(zip(choices, parts, strict=True)):
            if step < len(texts):
                is_last = step == len(texts) - 1
                is_cut = is_last and choice.finish_reason == "length"
                came = texts[step : step + 1] if streamed else choice.parts
                encoded = [vllm.tokenizer.encode(part, add_special_tokens=False) for part in came]
                ids = [token for part in encoded for token in part]
                outputs.append(
                    vllm.outputs.CompletionOutput(
                        index=index,
                        text=vllm.ours.CutText(texts[step]) if is_cut else texts[step],
                        token_ids=[*ids, vllm.tokenizer.eos_token_id] if is_last else ids,
                        cumulative_logprob=None,
                        logprobs=None,
                        finish_reason=choice.finish_reason if is_last else None,
                        stop_reason=choice.stop_reason if is_last else None,
                    )
                )
        yield vllm.outputs.RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=prompt,
            prompt_logprobs=None,
            outputs=outputs,
            finished=step == max(map(len, parts)) - 1,
        )


def serving(vllm: Any, kind: type, case: Case) -> Any:
    """vLLM's class for an API, without an engine."""
    handler = object.__new__(kind)
    handler.__dict__ |= {
        "parser_cls": parser_class(case.tool, case.reasoning),
        "model_config": None,
        "response_role": "assistant",
        "enable_auto_tools": True,
        "enable_force_include_usage": False,
        "enable_log_outputs": False,
        "enable_per_request_metrics": False,
        "enable_prompt_tokens_details": False,
        "_include_reasoning_tokens_details": case.reasoning is not None,
        "request_logger": None,
        "system_fingerprint": None,
        "use_harmony": False,
        "_effective_chat_template_kwargs": lambda request: case.kwargs,
    }
    return handler


def chat_request(vllm: Any, **fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    return vllm.chat_protocol.ChatCompletionRequest.model_validate(body | fields)


async def chat(
    vllm: Any, case: Case, choices: Sequence[Output], request: Any, prompt: list[int]
) -> tuple[Any, list[str]]:
    """The whole answer, and the events of the stream."""
    handler = serving(vllm, vllm.messages.AnthropicServingMessages, case)
    metadata = vllm.metadata.RequestResponseMetadata(request_id="r")

    def options(streamed: bool) -> dict[str, Any]:
        return {
            "request": request,
            "result_generator": results(vllm, choices, prompt, streamed),
            "request_id": "r",
            "model_name": "m",
            "conversation": [],
            "tokenizer": vllm.tokenizer,
            "request_metadata": metadata,
        }

    parser = handler._make_parser(request, vllm.tokenizer, case.kwargs)
    whole = await handler.chat_completion_full_generator(**options(False), parser=parser)
    events = [
        event
        async for event in handler.chat_completion_stream_generator(**options(True), chat_template_kwargs=case.kwargs)
    ]
    return whole, events


class Said(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    finish_reason: str | None
    stop_reason: str | int | None


def whole_said(answer: Any) -> list[Said]:
    return [
        Said(
            choice.message.reasoning or "",
            choice.message.content or "",
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls],
            choice.finish_reason,
            choice.stop_reason,
        )
        for choice in answer.choices
    ]


def streamed_said(events: list[str], num_choices: int) -> list[Said]:
    answers = [Said("", "", [], None, None) for _ in range(num_choices)]
    for event in events:
        if event.startswith("data: {"):
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                said, delta = answers[choice["index"]], choice["delta"]
                for call in delta.get("tool_calls") or ():
                    assert call["index"] == len(said.calls) and call["id"]
                    said.calls.append((call["function"]["name"], call["function"]["arguments"]))
                answers[choice["index"]] = Said(
                    said.reasoning + (delta.get("reasoning") or ""),
                    said.content + (delta.get("content") or ""),
                    said.calls,
                    choice.get("finish_reason") or said.finish_reason,
                    choice.get("stop_reason") or said.stop_reason,
                )
    return answers


@st.composite
def outputs(draw: st.DrawFn, case: Case) -> Output:
    """A text of the family's marks and calls: whole, cut anywhere, with letters changed; and how it came."""
    pieces = st.sampled_from([*PROSE, *case.calls, *case.calls, *case.marks, *case.think])
    text = "".join(draw(st.lists(pieces | st.text(max_size=3), max_size=6)))
    if case.reasoning is not None and draw(st.booleans()):
        text = f"{draw(st.sampled_from(['', case.think[0]]))}hm\n{case.think[1]}\n\n{text}"
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(["", "}", "\n", "<", '"'])) + text[at + 1 :]
    text = text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
    text = text.encode(errors="ignore").decode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12)))
    if draw(st.booleans()):
        cuts = list(range(1, len(text)))
    bounds = [0, *(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    reason = draw(st.sampled_from(["stop", "length"]))
    return Output(text, (*parts, *draw(st.sampled_from([(), ("",)]))), reason)


PROMPTS = ("", "<think>\n", "<think>\n\n</think>\n\n", "<|channel>thought\n", "</think>")
NAMED = {"type": "function", "function": {"name": "look"}}
CHOICES = ("auto", "auto", "auto", "none", "required", NAMED)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A request's fields about tools."""
    choice = draw(st.sampled_from(CHOICES))
    if choice == "none" and draw(st.booleans()):
        return {"tools": None}
    return {"tool_choice": choice, "parallel_tool_calls": draw(st.booleans())}


def for_each(*strategies: st.SearchStrategy[Any]) -> Any:
    """The same outputs in each run: a failure is found again."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        limits = settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
            phases=[Phase.generate],
        )
        return limits(given(*strategies)(check))

    return decorate


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """vLLM logs each call that it cannot parse."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", CASES)
def test_chat_and_messages_streams_say_what_whole_answers_say(vllm: Any, name: str) -> None:
    case = CASES[name]

    @for_each(st.lists(outputs(case), min_size=1, max_size=2), st.sampled_from(PROMPTS), requests())
    def check(sampled: list[Output], opened: str, fields: dict[str, Any]) -> None:
        request = chat_request(vllm, n=len(sampled), stream=True, stream_options={"include_usage": True}, **fields)
        prompt = vllm.tokenizer.encode(f"<|im_start|>assistant\n{opened}")
        whole, events = asyncio.run(chat(vllm, case, sampled, request, prompt))
        said = whole_said(whole)
        assert streamed_said(events, len(sampled)) == said, sampled
        assert json.loads(events[-2].removeprefix("data: "))["usage"] == whole.usage.model_dump(exclude_none=True)
        for choice, output in zip(said, sampled, strict=True):
            assert choice.finish_reason != "tool_calls" or output.finish_reason == "stop"
            for _, arguments in choice.calls:
                json.loads(arguments)
        if len(sampled) == 1:
            assert asyncio.run(messages_streamed(vllm, case, events)) == messages_whole(vllm, case, whole)

    check()


def messages_whole(vllm: Any, case: Case, answer: Any) -> tuple[list[dict[str, Any]], Any]:
    """The blocks of a whole answer of the Messages API, and why it ended."""
    handler = serving(vllm, vllm.messages.AnthropicServingMessages, case)
    message = handler.messages_full_converter(answer)
    blocks = [
        {
            key: value
            for key in ("type", "text", "thinking", "name", "input")
            if (value := getattr(block, key, None)) is not None
        }
        for block in message.content
    ]
    return [block for block in blocks if block != {"type": "text", "text": ""}], message.stop_reason


async def messages_streamed(vllm: Any, case: Case, events: list[str]) -> tuple[list[dict[str, Any]], Any]:
    """What the Messages API makes of a chat stream."""

    async def again() -> AsyncIterator[str]:
        for event in events:
            yield event

    handler = serving(vllm, vllm.messages.AnthropicServingMessages, case)
    blocks: list[dict[str, Any]] = []
    stop = None
    async for event in handler.message_stream_converter(again()):
        data = json.loads(event.partition("data: ")[2])
        if data["type"] == "content_block_start":
            blocks.append({"json": "", **data["content_block"]})
        elif data["type"] == "content_block_delta":
            for key, value in data["delta"].items():
                key = "json" if key == "partial_json" else key
                if key in ("json", "text", "thinking"):
                    blocks[-1][key] += value
        elif data["type"] == "message_delta":
            stop = data["delta"]["stop_reason"]
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
        block.pop("id", None)
        block.pop("signature", None)
    return blocks, stop


@pytest.mark.parametrize(
    ("kwargs", "opened", "thinks", "from_start"),
    [
        ({}, "", False, True),  # LFM2.5-Instruct: only earlier turns think
        ({}, "<think>\nhm<|im_end|>\n<|im_start|>assistant\n", False, True),  # a user's own mark
        ({}, "<think>\nLet me", True, False),  # the client has begun the answer
        ({}, "<think>\n", True, False),
        ({}, "<think>\n\n</think>\n\n", False, True),
        ({"enable_thinking": True}, "", True, False),  # Qwen3
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n", False, True),
    ],
)
def test_the_prompts_end_tells_whether_an_unmarked_text_is_thinking(
    vllm: Any, kwargs: dict[str, Any], opened: str, thinks: bool, from_start: bool
) -> None:
    case = CASES["hermes-qwen3"]._replace(thinks=kwargs.get("enable_thinking"))
    prompt = vllm.tokenizer.encode(f"<|im_start|>assistant\n{opened}")
    request = chat_request(vllm)
    for text, marked in (("a plain answer", False), ("<think>hm</think>yes", True)):
        output = Output(text, tuple(text), "stop")
        whole, events = asyncio.run(chat(vllm, case, [output], request, prompt))
        (said,) = whole_said(whole)
        assert [said] == streamed_said(events, 1)
        if not marked:
            assert (said.reasoning, said.content)[:: 1 if thinks else -1] == (text, "")
        elif not opened or opened.endswith("assistant\n"):
            assert (said.reasoning, said.content) == ("hm", "yes")
    parser = parser_class(case.tool, case.reasoning)(vllm.tokenizer, request.tools, chat_template_kwargs=case.kwargs)
    assert parser.is_reasoning_end(prompt) is from_start


@pytest.mark.parametrize("name", CASES)
def test_a_familys_own_output_is_read_right(vllm: Any, name: str) -> None:
    case = CASES[name]
    prompt = vllm.tokenizer.encode("<|im_start|>assistant\n")
    thought = f"{case.think[0]}hm{case.think[1]}"

    def say(text: str, reason: str = "stop") -> Said:
        output = Output(text, tuple(text), reason)
        whole, events = asyncio.run(chat(vllm, case, [output], chat_request(vllm), prompt))
        (said,) = whole_said(whole)
        assert [said] == streamed_said(events, 1)
        return said

    plain = say("I look, a < b.")
    unasked = case.thinks is True and case.reasoning != "gemma4"
    assert (plain.reasoning if unasked else plain.content) == "I look, a < b."
    assert (plain.content if unasked else plain.reasoning) == "" and not plain.calls
    end = case.think[1] if unasked else ""
    for call in case.calls:
        one, after_text = say(end + call), say(f"{end}I look.\n{call}")
        assert one.finish_reason == "tool_calls"
        assert [called for called, _ in one.calls] == ["look"] * call.count("look")
        arguments = [item for _, said in one.calls for item in json.loads(said).items()]
        assert arguments.count(("city", "Paris")) == call.count("Paris")
        assert len(arguments) == call.count("Paris") + call.count("days")
        assert after_text.calls == ([] if name == "llama4_pythonic" else one.calls)
        cut = say(end + call[: -len(call) // 3], "length")
        assert cut.finish_reason == "length" and cut.calls == one.calls[: len(cut.calls)]
        assert "I look." in after_text.content and not one.reasoning
        if case.reasoning is not None and case.thinks is not False:
            thinking = say(thought + (case.answer.format(call) if name == "hunyuan_a13b" else call))
            assert (thinking.reasoning.strip(), thinking.calls) == ("hm", one.calls)
    if case.reasoning is not None and case.thinks is not False:
        thinking = say(thought + case.answer.format("yes"))
        assert (thinking.reasoning.strip(), thinking.content.strip()) == ("hm", "yes")


def test_calls_with_one_id_stay_two(vllm: Any) -> None:
    """Kimi K2 writes the ids itself. A client of /v1/messages would join the arguments of equal ones."""
    case = CASES["kimi_k2"]
    output = Output(case.calls[1], (case.calls[1],), "stop")
    prompt = vllm.tokenizer.encode("<|im_start|>assistant\n")
    request = chat_request(vllm, stream=True, stream_options={"include_usage": True})
    whole, events = asyncio.run(chat(vllm, case, [output], request, prompt))
    ids = [call.id for call in whole.choices[0].message.tool_calls]
    assert len(set(ids)) == 2 and ids[0] == "functions.look:0"
    assert asyncio.run(messages_streamed(vllm, case, events)) == messages_whole(vllm, case, whole)


STREAMED = '<tool_call>{"name": "look", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reason", "content", "calls", "finish"),
    [
        # A stop text inside the arguments (vllm#34101).
        ('<tool_call>{"name": "look", "arguments": {"a": 12,', "stop", None, 0, "stop"),
        # A call cut at max_tokens (beside vllm#53255).
        ('<tool_call>\n{"', "length", None, 0, "length"),
        (f"I look.\n{STREAMED}", "stop", "I look.\n", 1, "tool_calls"),
        (f"{STREAMED}\n{STREAMED}", "length", "", 2, "length"),
        (f'{STREAMED}\n<tool_call>{{"name', "length", None, 0, "length"),
        ("a < b <tool", "stop", "a < b <tool", 0, "stop"),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "stop", None, 0, "stop"),
        ('<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>', "stop", None, 0, "stop"),
        # vLLM's parser ends a call at the first mark.
        ('<tool_call>{"name": "look", "arguments": {"a": "</tool_call>"}}</tool_call>', "stop", None, 0, "stop"),
        ('<tool_call>{"name": "look", "arguments": {"a": "<\\/tool_call>"}}</tool_call>', "stop", "", 1, "tool_calls"),
    ],
)
def test_calls_are_complete_or_text(
    vllm: Any, text: str, reason: str, content: str | None, calls: int, finish: str
) -> None:
    request = chat_request(vllm)
    output = Output(text, tuple(text), reason)
    whole, events = asyncio.run(chat(vllm, CASES["hermes"], [output], request, []))
    (said,) = whole_said(whole)
    assert [said] == streamed_said(events, 1)
    assert said.content == (text if content is None else content)
    assert (len(said.calls), said.finish_reason) == (calls, finish)


CUT = {
    "qwen3_xml": (XML, "aris", 0),
    "gemma4": (GEMMA, "aris", 0),
    "glm45": (GLM, "aris", 0),
    "kimi_k2": (KIMI, "aris", 0),
    "minimax_m2": (MINIMAX, "aris", 0),
    "seed_oss": (SEED, "aris", 0),
    # A stop text that is itself the end of a call does not cut it.
    "glm45 ends": (GLM, "</tool_call>", 1),
    "qwen3_xml ends": (XML, "</tool_call>", 1),
}


@pytest.mark.parametrize("case", CUT)
def test_a_call_that_a_stop_text_cut_is_text(vllm: Any, case: str) -> None:
    call, stop, calls = CUT[case]
    text = call[: call.index(stop)]
    request = chat_request(vllm, stop=[stop])
    output = Output(text, tuple(text), "stop", stop)
    whole, events = asyncio.run(chat(vllm, CASES[case.split()[0]], [output], request, []))
    (said,) = whole_said(whole)
    assert [said] == streamed_said(events, 1)
    assert (len(said.calls), said.finish_reason) == (calls, "tool_calls" if calls else "stop")
    assert calls or said.content == text


def deltas_of(vllm: Any, case: Case, parts: Sequence[str], **fields: Any) -> list[str]:
    """What the stream sends with each part: thinking in brackets."""
    request = chat_request(vllm, **fields)
    parser = parser_class(case.tool, case.reasoning)(vllm.tokenizer, request.tools, chat_template_kwargs=case.kwargs)
    sent = []
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        delta = parser.parse_delta(part, [5], request, [5], finished=is_last)
        thinking = f"[{delta.reasoning}]" if delta and delta.reasoning else ""
        sent.append(thinking + ((delta.content or "") if delta else ""))
    return sent


def test_text_comes_as_it_is_sampled_up_to_the_first_mark(vllm: Any) -> None:
    parts = ["I", " look", ".", "\n", "a <", " b", "\n<tool", "_call>", '{"', "name"]
    sent = ["I", " look", ".", "", "\na", " < b", "", "", "", '\n<tool_call>{"name']
    assert deltas_of(vllm, CASES["hermes"], parts) == sent
    plain = ["I", " ", "<tool_call>", "\n", "{"]
    assert deltas_of(vllm, CASES["hermes"], plain, tools=None) == plain
    thought = ["<think>", "\nhm", "\n", "</th", "ink>", "\n\n", "yes", " <tool_call>", ""]
    assert deltas_of(vllm, CASES["hermes-qwen3"], thought) == [
        *("", "[\nhm]", "", "", "[\n]", "", "\n\nyes", ""),
        " <tool_call>",
    ]
    assert deltas_of(vllm, CASES["hermes-qwen3-on"], ["hm", "</think>", "{", "}"], tool_choice="required") == [
        "[hm]",
        *("", "", "{}"),
    ]


LOSING = ("llama3_json", "muse_glimmer", "olmo3", "phi4_mini_json")
"""Tool parsers of vLLM's that lose the text before a call."""


def test_what_vllm_says_of_a_whole_answer_stays(vllm: Any) -> None:
    cases = [case for name, case in CASES.items() if name != "lfm2"]  # vLLM drops its marks
    for case in cases:
        for call in case.calls:
            for before in ("", "I look.\n", f"{case.think[0]}hm{case.think[1]}yes"):
                request = chat_request(vllm)
                changed = parser_class(case.tool, case.reasoning)
                own = changed.__mro__[2](vllm.tokenizer, request.tools, chat_template_kwargs=case.kwargs)
                ours = changed(vllm.tokenizer, request.tools, chat_template_kwargs=case.kwargs)
                text = before + call
                reasoning, content, calls = own.parse(text, request, True)
                # Text behind Muse Glimmer's thinking would have a head of its own.
                is_all = reasoning and (case.think[1] not in text or case.tool == "muse_glimmer")
                if case.tool in LOSING and not is_all:
                    end = case.think[1] if case.reasoning else "\0"
                    content = before.rpartition(end)[2].rstrip() or None
                said = ours.parse(text, request, True)
                assert said[:2] == (reasoning, content), (case, text)
                assert [(c.name, c.arguments) for c in said[2] or ()] == [(c.name, c.arguments) for c in calls or ()]


def test_a_parser_with_its_own_whole_answers_is_held_to_the_end(vllm: Any) -> None:
    class Own(vllm.abstract.Parser):
        def parse(self, model_output: str, request: Any, *args: Any) -> Any:
            return None, f"{model_output}!", None

        def parse_delta(self, delta_text: str, *args: Any, **options: Any) -> Any:
            return vllm.metadata.DeltaMessage(content=delta_text)

    kind = vllm.ours.whole_parser(Own)
    for tools, expected in (([TOOL], [None, "ab!"]), (None, ["a", "b"])):
        request, parser = chat_request(vllm, tools=tools), kind(vllm.tokenizer)
        deltas = [parser.parse_delta(text, [5], request, [5], finished=text == "b") for text in "ab"]
        assert [delta and delta.content for delta in deltas] == expected


def test_half_a_surrogate_pair_in_a_call_is_replaced(vllm: Any) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"city": "\\ud83c", "b": "\\ud83c\\udf1e"}}</tool_call>'
    for case in (CASES["hermes"], CASES["mistral"]):
        text = text if case.tool == "hermes" else f"[TOOL_CALLS]look[ARGS]{text[41:-13]}"
        request = chat_request(vllm)
        whole, events = asyncio.run(chat(vllm, case, [Output(text, tuple(text), "stop")], request, []))
        (said,) = whole_said(whole)
        assert [said] == streamed_said(events, 1)
        assert json.loads(said.calls[0][1]) == {"city": "\ufffd", "b": "🌞"}


RESPONDING = (
    *("hermes", "hermes-qwen3", "hermes-qwen3-on", "hermes-qwen3-off", "mistral", "gemma4", "kimi_k2"),
    *("hunyuan_a13b", "hy_v3-thinks", "muse_glimmer"),
)
"""Parsers of each kind: with thinking and without, told by marks, by the prompt's end or by arguments of the template, with
frames around answers, with ids in calls. All parsers stream chats in the same way."""


@pytest.mark.parametrize("name", RESPONDING)
def test_responses_streams_say_what_whole_answers_say(vllm: Any, name: str) -> None:
    case = CASES[name]

    @for_each(outputs(case), st.sampled_from(PROMPTS), requests())
    def check(sampled: Output, opened: str, fields: dict[str, Any]) -> None:
        tools = [{"type": "function", **TOOL["function"]}]
        choice = fields.get("tool_choice", "auto")
        choice = choice if isinstance(choice, str) else {"type": "function", "name": "look"}
        body = {"model": "m", "input": "hi", **fields, "tools": tools, "tool_choice": choice}
        request = vllm.responses_protocol.ResponsesRequest.model_validate(body)
        prompt = vllm.tokenizer.encode(f"<|im_start|>assistant\n{opened}")
        whole, streamed = asyncio.run(responses(vllm, case, sampled, request, prompt))
        assert streamed == whole, sampled

    check()


async def responses(
    vllm: Any, case: Case, output: Output, request: Any, prompt: list[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The items of the whole answer, and those that the stream has made."""
    handler = serving(vllm, vllm.responses.OpenAIServingResponses, case)

    async def contexts(context: Any, streamed: bool) -> AsyncIterator[Any]:
        async for result in results(vllm, [output], prompt, streamed):
            context.append_output(result)
            yield context

    def make_context() -> Any:
        parser = parser_class(case.tool, case.reasoning)(
            vllm.tokenizer, request.tools, chat_template_kwargs=case.kwargs
        )
        parser.set_prompt_token_ids(prompt)
        return vllm.context.SimpleContext(response_parser=parser)

    context = make_context()
    async for _ in contexts(context, False):
        pass
    whole = handler._make_response_output_items(
        request, context.final_output.outputs[0], vllm.tokenizer, context.response_parser
    )
    context = make_context()
    events = handler._process_simple_streaming_events(
        request, None, contexts(context, True), context, "m", vllm.tokenizer, None, 0, lambda e: e
    )
    async for _ in events:
        pass
    return items_of(whole), items_of(context.streamed_output_items)


def items_of(items: list[Any]) -> list[dict[str, Any]]:
    """Output items, without what is made anew for each."""
    made_anew = ("id", "call_id", "status", "logprobs")
    kept: list[dict[str, Any]] = []
    for item in items:
        fields = {key: value for key, value in item.model_dump(mode="json").items() if key not in made_anew}
        for key, value in fields.items():
            if isinstance(value, list):
                fields[key] = [{k: v for k, v in part.items() if k not in made_anew} for part in value]
        kept.append(fields)
    return kept


FRAMES = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "<|constrain|>json", "<|call|>")  # fmt: skip
HARMONY = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
HARMONY_THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
ANSWERED = "<|channel|>final<|message|>I look, a < b.<|return|>"
FIRST = HARMONY.replace("<|call|>", "<|end|><|start|>assistant")


def harmony_said(vllm: Any, text: str) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """What gpt-oss' parser says of an answer, whole and streamed by token. Its tokens are those of its own encoding."""
    encoding = vllm.ours.get_encoding()
    ids, request = encoding.encode(text, allowed_special="all"), chat_request(vllm)
    manager = importlib.import_module("vllm.parser").ParserManager
    kind = manager.get_parser("openai", "openai_gptoss", True, is_harmony=True)
    plain = [t for t in ids if not encoding.is_special_token(t)]  # the engine's text has no marks
    reasoning, content, calls = kind(vllm.tokenizer, request.tools).parse(encoding.decode(plain), request, True, ids)
    said = (reasoning, content, [(call.name, call.arguments) for call in calls or ()])
    stream, came = kind(vllm.tokenizer, request.tools), ""
    for at, token in enumerate(ids):
        is_last = at == len(ids) - 1
        before = [t for t in ids[: at + 1] if not encoding.is_special_token(t)]
        so_far = encoding.decode(before)
        # As the engine does: a character comes when all of its bytes have come.
        part = so_far[len(came) :] if is_last or not so_far.endswith("\ufffd") else ""
        came += part
        delta = stream.parse_delta(part, [token], request, [1], finished=is_last)
        assert is_last or delta is None
        if delta is not None:
            streamed_calls = [(call.function.name, call.function.arguments) for call in delta.tool_calls]
            assert (delta.reasoning, delta.content, streamed_calls) == said
    return said


def test_gpt_oss_own_output_is_read_right(vllm: Any) -> None:
    call = ("look", '{"city": "Paris", "days": 3}')
    assert harmony_said(vllm, ANSWERED) == (None, "I look, a < b.", [])
    assert harmony_said(vllm, "I look, a < b.") == (None, "I look, a < b.", [])
    assert harmony_said(vllm, HARMONY) == (None, None, [call])
    assert harmony_said(vllm, FIRST + HARMONY) == (None, None, [call, call])
    assert harmony_said(vllm, HARMONY_THOUGHT + ANSWERED) == ("hm", "I look, a < b.", [])
    assert harmony_said(vllm, HARMONY_THOUGHT + HARMONY) == ("hm", None, [call])
    cut = HARMONY.partition(", ")[0]
    assert harmony_said(vllm, HARMONY_THOUGHT + cut) == ("hm", '{"city": "Paris"', [])
    assert harmony_said(vllm, FIRST + cut) == (None, '{"city": "Paris"', [call])


@settings(deadline=None, max_examples=EXAMPLES)
@given(data=st.data())
def test_a_stream_of_gpt_oss_says_what_the_whole_answer_says(vllm: Any, data: st.DataObject) -> None:
    pieces = [*PROSE, *FRAMES, HARMONY, FIRST, HARMONY_THOUGHT, ANSWERED]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=6)))
    text = text[: data.draw(st.integers(0, len(text)))]
    _, content, calls = harmony_said(vllm, text)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert content is None or content


# --- control tokens ---


def request_of(vllm: Any, case: Case, **fields: Any) -> Any:
    """A chat request as vLLM passes it on to its engine."""
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": [TOOL], **fields}
    request = vllm.chat_protocol.ChatCompletionRequest.model_validate(body)
    parser = parser_class(case.tool, case.reasoning)(
        vllm.tokenizer, request.tools, chat_template_kwargs=case.kwargs, model_config=None
    )
    return parser.adjust_request(request)


def decoded(vllm: Any, request: Any, token_ids: Sequence[int], is_ended: bool = True) -> str:
    """The text that vLLM's engine makes of an answer, token by token."""
    params = request.to_sampling_params(100, {})
    asked = SimpleNamespace(request_id="r", sampling_params=params, prompt_token_ids=[1], prompt_embeds=None)
    detokenizer = vllm.detokenizer.IncrementalDetokenizer.from_new_request(vllm.tokenizer, asked)
    for index, token in enumerate(token_ids, 1):
        detokenizer.update([token], is_ended and index == len(token_ids))
    assert list(detokenizer.output_token_ids) == list(token_ids)
    return detokenizer.get_next_output_text(True, False)


@pytest.mark.parametrize("name", CASES)
def test_kept_ends_are_no_text_and_what_a_parser_reads_stays(vllm: Any, name: str) -> None:
    case = CASES[name]
    end, header = vllm.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    for text in (*case.calls, *(case.think if case.reasoning else ())):
        answer = vllm.tokenizer.encode(f"yes {text}", add_special_tokens=False)
        for kept in ({"include_stop_str_in_output": True}, {"ignore_eos": True}):
            for asked in ({}, {"skip_special_tokens": True}):
                request = request_of(vllm, case, **kept, **asked)
                # Where the parser reads no control tokens, vLLM itself leaves out all.
                plain = vllm.tokenizer.decode(answer, skip_special_tokens=request.skip_special_tokens)
                assert decoded(vllm, request, [*answer, end]) == plain
    words = vllm.tokenizer.encode("yes", add_special_tokens=False)
    passed = request_of(vllm, case, ignore_eos=True)
    assert decoded(vllm, passed, [*words, end, header, *words], is_ended=False) == "yesyes"
    shown = request_of(vllm, case, include_stop_str_in_output=True, skip_special_tokens=False)
    assert decoded(vllm, shown, [*words, end]) == "yes<|im_end|>"


def test_letters_that_spell_an_end_stay(vllm: Any) -> None:
    words = vllm.tokenizer.encode("<|im_", add_special_tokens=False) + vllm.tokenizer.encode(
        "end|> ok", add_special_tokens=False
    )
    (end,) = vllm.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    request = request_of(vllm, CASES["hermes-qwen3"], include_stop_str_in_output=True)
    assert decoded(vllm, request, [*words, end]) == "<|im_end|> ok"


def test_a_stop_string_is_not_found_in_an_end(vllm: Any) -> None:
    words = vllm.tokenizer.encode("no", add_special_tokens=False)
    (end,) = vllm.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    request = request_of(vllm, CASES["hermes-qwen3"], include_stop_str_in_output=True, stop=["e"])
    assert decoded(vllm, request, [*words, end]) == "no"
