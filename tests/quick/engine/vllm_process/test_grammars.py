"""Grammars as vLLM's engine compiles them, with the real backends and without an engine."""

import asyncio
import json
import types
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from art_server.engine.vllm_process import child, grammars
from art_server.shared.engine_messages import GRAMMAR_MARK
from art_server.store.base_models import TINY_DIR

with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
    from vllm.config.structured_outputs import StructuredOutputsConfig
    from vllm.entrypoints.generate.base import protocol
    from vllm.exceptions import VLLMClientError, VLLMValidationError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager, backend_guidance
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

# vLLM calls xgrammar's matcher with an argument that xgrammar no longer needs.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")

JSON = StructuredOutputOptions.JSON
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {}}},
        "required": ["a"],
    }
)
TAG = json.dumps(
    {
        "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
        "triggers": ["<f>"],
    }
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_DIR)


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's classes as our plugin leaves them, for one test."""
    for owner, name in (
        (StructuredOutputManager, "grammar_init"),
        (StructuredOutputManager, "_create_grammar"),
        (XgrammarBackend, "__post_init__"),
        (backend_guidance, "serialize_guidance_grammar"),
        (SamplingParams, "_validate_structured_outputs"),
        (protocol.FunctionCall, "__init__"),
        (protocol.DeltaFunctionCall, "__init__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    grammars.install()
    yield


def vllm_config(vocab_size: int) -> Any:
    return types.SimpleNamespace(
        structured_outputs_config=types.SimpleNamespace(
            disable_any_whitespace=False, disable_additional_properties=False
        ),
        model_config=types.SimpleNamespace(
            hf_config=types.SimpleNamespace(model_type="qwen3"), get_vocab_size=lambda: vocab_size
        ),
        speculative_config=None,
    )


@pytest.mark.parametrize("backend_class", [XgrammarBackend, GuidanceBackend])
def test_blanks_between_elements_are_limited(tokenizer: Any, backend_class: Any) -> None:
    backend = backend_class(vllm_config(len(tokenizer)), tokenizer, len(tokenizer))

    def accepts(text: str) -> bool:
        grammar = backend.compile_grammar(JSON, SCHEMA)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return len(grammar.validate_tokens(tokens)) == len(tokens)

    def indented(blanks: str) -> str:
        return '{"a":' + blanks + "1," + blanks + '"b":[1, {"c":' + blanks + "2}]}"

    assert accepts('{"a":1}') and accepts('{"a": 1, "b": [1, 2]}')
    assert accepts(indented(" ")) and accepts(indented("\n" + " " * 16))
    assert not accepts(indented(" " * (grammars.MAX_BLANKS + 8)))
    if backend_class is XgrammarBackend:
        assert accepts(json.dumps(json.loads(indented("")), indent=4))


def test_the_json_of_tags_and_tools_is_limited_too(tokenizer: Any) -> None:
    backend = XgrammarBackend(vllm_config(len(tokenizer)), tokenizer, len(tokenizer))
    newer = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"type": {}}}}
    for tag in (TAG, json.dumps({"type": "structural_tag", "format": newer})):
        grammar = backend.compile_grammar(StructuredOutputOptions.STRUCTURAL_TAG, tag)
        start, end = ("<f>", "</f>") if tag is TAG else ("", "")
        for blanks, is_right in ((2, True), (100, False)):
            text = start + '{"type":' + " " * blanks + "1}" + end
            tokens = tokenizer.encode(text, add_special_tokens=False)
            assert (len(grammar.validate_tokens(tokens)) == len(tokens)) == is_right


def test_each_grammar_is_compiled_by_the_backend_that_checked_it() -> None:
    """vLLM's own manager compiles all with the first request's."""

    class Grammar:
        def __init__(self, kind: str):
            self.kind = kind

        def fill_bitmask(self, bitmask: Any, index: int) -> None:
            bitmask[index] = self.kind != "empty"

    def fake_backend(kind: str) -> Any:
        return types.SimpleNamespace(
            compile_grammar=lambda *_, **__: Grammar(kind),
            allocate_token_bitmask=lambda number: np.zeros((number, 4), np.int32),
        )

    class Executor:
        def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            try:
                future.set_result(function(*arguments))
            except ValueError as error:
                future.set_exception(error)
            return future

    manager: Any = object.__new__(StructuredOutputManager)
    manager.backends = {kind: fake_backend(kind) for kind in ("xgrammar", "guidance", "empty")}
    manager._use_async_grammar_compilation = True
    manager.executor = Executor()
    for kind in ("xgrammar", "guidance", "xgrammar", "empty"):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA))
        assert params.structured_outputs is not None
        params.structured_outputs._backend = kind
        wanted = types.SimpleNamespace(structured_output_key=(JSON, SCHEMA), grammar=None)
        request = types.SimpleNamespace(structured_output_request=wanted, sampling_params=params)
        manager.grammar_init(request)
        if kind != "empty":
            assert wanted.grammar.result().kind == kind
    with pytest.raises(ValueError):
        wanted.grammar.result()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"grammar": 'root ::= "a"\nroot ::= "b"'}, 'Rule "root" is defined multiple times'),
        ({"grammar": "root ::= nothing"}, 'Rule "nothing" is not defined'),
        ({"regex": "(a"}, "unclosed group"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"$ref": "#/$defs/none"}}, "'/$defs/none' does not exist"),
        ({"structural_tag": "{}"}, "triggers"),
        ({"json": {"type": "array", "items": [{"type": "string"}]}}, None),
        ({"grammar": 'root ::= "a" | "b"'}, None),
        ({"choice": ["yes", "no"]}, None),
    ],
)
def test_a_grammar_is_refused_before_sampling_with_the_reason(
    tokenizer: Any, options: dict[str, Any], reason: str | None
) -> None:
    child.name_bad_grammars()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**options))
    arguments = types.SimpleNamespace(is_diffusion=False), StructuredOutputsConfig(), tokenizer
    if reason is None:
        params._validate_structured_outputs(*arguments)  # pyright: ignore[reportArgumentType]
        return
    with pytest.raises(VLLMClientError) as error:
        params._validate_structured_outputs(*arguments)  # pyright: ignore[reportArgumentType]
    message = str(error.value)
    assert message.startswith(f"{GRAMMAR_MARK}: ") and reason in message
    assert "/project/" not in message and len(message) < 600


def test_arguments_of_calls_contain_no_half_characters() -> None:
    child.send_no_half_surrogates()
    call = protocol.FunctionCall(name="f", arguments='{"x": "a\ud83cb"}')
    delta = protocol.DeltaFunctionCall(arguments=r'"\ud83c\udf89 \udf89"')
    assert call.arguments == '{"x": "a\ufffdb"}'
    assert delta.arguments == r'"\ud83c\udf89 \ufffd"'
    assert protocol.DeltaFunctionCall(name="f").arguments is None


def test_a_manager_with_one_named_backend_takes_grammars_for_another() -> None:
    """As in vLLM 0.33."""

    class Manager:
        backend: str | None = None
        backend_name: str | None = None

        def grammar_init(self, request: Any) -> None:
            kind = request.sampling_params.structured_outputs._backend
            if self.backend_name not in (None, kind):
                raise VLLMValidationError("one backend per engine")
            if self.backend is None:
                self.backend = f"a backend for {kind}"
            self.backend_name = kind

    grammars.use_own_backends(Manager)
    manager, used = Manager(), []
    for kind in ("xgrammar", "guidance", "xgrammar"):
        outputs = types.SimpleNamespace(structured_outputs=types.SimpleNamespace(_backend=kind))
        manager.grammar_init(types.SimpleNamespace(structured_output_request=object(), sampling_params=outputs))
        used.append(manager.backend)
    assert used == ["a backend for xgrammar", "a backend for guidance", "a backend for xgrammar"]


@pytest.mark.parametrize(
    ("message", "is_marked"), [("Invalid structured outputs: no rule", True), ("prompt is too long", False)]
)
def test_an_error_about_a_grammar_that_the_engine_raises_is_marked(message: str, is_marked: bool) -> None:
    """As vLLM 0.33 raises it; 0.32 ends the answer with the reason `error`."""

    async def results() -> AsyncIterator[Any]:
        yield "an output"
        raise VLLMValidationError(message)

    async def ask() -> list[Any]:
        return [output async for output in child.with_marked_grammar(results())]

    with pytest.raises(VLLMValidationError) as raised:
        asyncio.run(ask())
    assert str(raised.value).startswith(GRAMMAR_MARK) == is_marked
