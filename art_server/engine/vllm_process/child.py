"""vLLM's API server, whose wrapped engine client samples from exact tokens of earlier turns and reports each choice.

Started by `Engine._start_process` as `python -m art_server.engine.vllm_process.child RECORDS_SOCKET [vLLM's flags]`. Every API that vLLM serves
(chat, completions, responses, messages; streaming or not) samples through `engine_client.generate`. The wrapper sends
the rendered prompt of a continued conversation to the server's ledger, which may answer with other tokens. It requests
the log-probabilities of the sampled tokens, and removes them from the output if the client did not request them. It
sends one JSON line for each finished choice. vLLM's middleware (CORS, keys, HTTP statistics) is removed: every event of
a stream would pass through it, and nothing behind the proxy needs it. Texts of messages are tokenised as text
(`plain_text.py`). Streams contain the same as whole answers (`whole_answers.py`), and
no control tokens (`hidden_tokens.py`).

Only this file, these three, and `vllm_plugin.py` with the modules that it installs touch vLLM's internals; all names are in
`shared/vllm_names.py`. `tests/engine/integration/test_inference.py` and `tests/quick/engine/vllm_process` fail when they change.
"""

import asyncio
import contextlib
import contextvars
import functools
import hmac
import math
import os
import re
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from art_server.engine.vllm_process import plain_text, sampling_payload
from art_server.process.children import be_child, collect_seldom
from art_server.shared.engine_messages import GRAMMAR_MARK, CutText, is_first_turn, whole_characters
from art_server.shared.switches import PORT_SWITCH, RAW_SWITCH, SECRET_HEADER, SECRET_SWITCH

if __name__ in ("__main__", "__mp_main__"):
    # vLLM forks or spawns its workers from this process. They do not inherit PR_SET_PDEATHSIG, so each sets it again.
    be_child()
    os.register_at_fork(after_in_child=be_child)


class StoredPrompt(NamedTuple):
    """The ledger's answer to a rendered prompt."""

    token_ids: list[int] | None
    """The tokens to sample from instead of the rendered tokens; None keeps the rendered tokens."""
    is_stored: bool
    """Whether the ledger could store the prompt that is sampled from."""


class LedgerClient:
    """A connection to the server's ledger: fetches prompts and sends samples, in order."""

    def __init__(self, socket_path: str):
        self._socket_path = socket_path
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._pending: dict[str, asyncio.Future[StoredPrompt]] = {}

    async def connect(self) -> None:
        # asyncio's own limit of a line is 64 KiB, and an answer is a whole prompt.
        reader, self._writer = await asyncio.open_unix_connection(self._socket_path, limit=1 << 28)
        self._reading = asyncio.create_task(self._read(reader))

    def send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None, "connect() comes first"
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def fetch_prompt(self, request_id: str, token_ids: list[int]) -> StoredPrompt:
        """The ledger's answer to a rendered prompt."""
        answer = self._pending[request_id] = asyncio.get_running_loop().create_future()
        self.send({"request_id": request_id, "prompt": token_ids})
        try:
            return await answer
        finally:
            self._pending.pop(request_id, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = msgspec.json.decode(line)
            answer = self._pending.get(message["request_id"])
            if answer is not None and not answer.done():
                answer.set_result(StoredPrompt(message["token_ids"], message["is_stored"]))
        os._exit(1)  # the server is gone


class ChoicePart(NamedTuple):
    """A choice or, in a stream, the part that one step of the engine added to the choice."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]] | None
    entries: Sequence[Sequence[int]] = ()
    """One entry for each token (`sampling_payload.py`)."""


MAX_REASON = 500
"""Characters of the reason why a grammar is refused. Some contain the whole grammar."""

NOT_FINITE = -9999.0
"""Replaces a log-probability that JSON cannot represent, as in vLLM's own answers."""


def summary_of(parts: Sequence[ChoicePart], source: sampling_payload.LogprobSource = "unknown") -> dict[str, Any]:
    """A whole choice: its text, its tokens, their log-probabilities, and what each token was sampled from."""
    logprobs = [
        float(entry[token].logprob)
        for part in parts
        for token, entry in zip(part.token_ids, part.logprobs or (), strict=True)
    ]
    entries = [entry for part in parts for entry in part.entries]
    sampled_logprobs, kept, sets = sampling_payload.read_choice(source, logprobs, entries)
    return {
        "text": "".join(part.text for part in parts),
        "token_ids": [int(token) for part in parts for token in part.token_ids],
        "logprobs": [value if math.isfinite(value) else NOT_FINITE for value in logprobs],
        "sampled_logprobs": sampled_logprobs,
        "kept": kept,
        "sets": sets,
    }


def sampling_summary(params: Any) -> dict[str, Any]:
    """The sampling parameters on which the meaning of the sampled log-probabilities depends."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "n": params.n,
        "max_tokens": params.max_tokens,
        "structured": params.structured_outputs is not None,
        "logit_bias": params.logit_bias or None,
        "min_tokens": params.min_tokens,
        "bad_words": bool(params.bad_words),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "thinking_token_budget": params.thinking_token_budget,
    }


def with_prompt(prompt: Any, token_ids: list[int], sampling_params: Any, max_model_len: int) -> Any | None:
    """A copy of a rendered prompt with other tokens; None if the requested number of tokens does not fit behind them.

    vLLM sets the limit of an unlimited answer to the context's end. Only such a limit is changed, in `sampling_params`.
    """
    room = max_model_len - len(token_ids)
    whole = max_model_len - len(prompt["prompt_token_ids"])
    limit = whole if sampling_params.max_tokens is None else sampling_params.max_tokens
    is_unlimited = limit >= whole
    if room < 1 or (limit > room and not is_unlimited):
        return None
    if is_unlimited:
        sampling_params.max_tokens = room
    # Without `prompt` and `prompt_token_offsets`, which belong to the rendered tokens.
    return {"type": "token", "prompt_token_ids": token_ids} | {
        key: value for key, value in prompt.items() if key in ("arrival_time", "cache_salt")
    }


def record_generate(generate: Any, ledger: LedgerClient, max_model_len: int) -> Any:
    """Wraps `engine_client.generate`: samples from the ledger's prompt, yields the same outputs, sends each choice."""

    async def recorded(prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        hide_logprobs = sampling_params.logprobs is None
        if hide_logprobs:
            # 0: of the sampled token only.
            sampling_params.logprobs = 0
        rendered: list[int] | None = None
        # A prompt with images has another type: turns behind an image are not trained.
        if isinstance(prompt, dict) and prompt.get("type") == "token":
            rendered = list(prompt["prompt_token_ids"])
            if not is_first_turn(request_id):
                replaced, is_stored = await ledger.fetch_prompt(request_id, rendered)
                spliced = None
                if replaced is not None:
                    spliced = with_prompt(prompt, replaced, sampling_params, max_model_len)
                if spliced is not None or (replaced is None and is_stored):
                    rendered = None  # the ledger has the prompt that is sampled from
                prompt = spliced or prompt
        source = sampling_payload.logprob_source(sampling_params)
        if sampling_params.structured_outputs is not None and request_id.startswith("cmpl-"):
            # A completion does not think, but vLLM would wait for the end of thinking before it applies the grammar.
            options.setdefault("reasoning_ended", True)
        is_constrained = sampling_params.structured_outputs is not None
        choices: defaultdict[int, list[ChoicePart]] = defaultdict(list)
        results = generate(prompt, sampling_params, request_id, **options)
        async for result in with_marked_grammar(results) if is_constrained else results:
            for output in result.outputs:
                if output.finish_reason == "error" and is_constrained:
                    # vLLM (0.32, scheduler.py) ends a request like this if it cannot compile the grammar, or if the grammar rejects
                    # a sampled token.
                    raise bad_grammar(NOT_COMPILED)
                if output.finish_reason == "length":
                    # vLLM's parsers get only the text, from which they cannot know that the limit ended the answer.
                    output.text = CutText(output.text)
                # vLLM's APIs request deltas for streams, and else one final output: the parts of a choice never repeat each other.
                parts = choices[output.index]
                # `kept_sets.py` sends its entries in vLLM's field for masks.
                mask, output.sampling_mask = output.sampling_mask, None
                entries = mask.token_ids if mask is not None else ()
                parts.append(ChoicePart(output.text, output.token_ids, output.logprobs, entries))
                if hide_logprobs:
                    output.logprobs = None
                if output.finish_reason is not None:
                    # Before vLLM has the output: the server ends the answer when it has stored this record (`OpenRequest.wait`).
                    ledger.send(
                        {
                            "request_id": request_id,
                            "rendered": rendered,
                            "index": output.index,
                            **summary_of(parts, source),
                            "finish_reason": output.finish_reason,
                            "stop_reason": output.stop_reason,
                            "sampling": sampling_summary(sampling_params),
                        }
                    )
            yield result

    return recorded


counted_request: contextvars.ContextVar[str | None] = contextvars.ContextVar("counted_request", default=None)
"""The id of the request to count the tokens of a prompt that is rendered at this moment."""


def count_exact_tokens(ledger: LedgerClient, max_model_len: int) -> None:
    """Has /v1/messages/count_tokens count the tokens from which the same request would be sampled (`record_generate`)."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    count, render = AnthropicServingMessages.count_tokens, AnthropicServingMessages.render_chat_request

    async def count_tokens(self: Any, request: Any, raw_request: Any) -> Any:
        counted_request.set(raw_request.headers["x-request-id"])  # in this request's own context
        return await count(self, request, raw_request)

    async def render_chat_request(self: Any, request: Any) -> Any:
        rendered: Any = await render(self, request)
        request_id = counted_request.get()
        if request_id is None or is_first_turn(request_id) or not isinstance(rendered, tuple):
            return rendered  # nothing is counted, nothing continued, or an error
        conversation, (prompt,) = rendered
        stored = await ledger.fetch_prompt(request_id, list(prompt["prompt_token_ids"]))
        if stored.token_ids is not None and len(stored.token_ids) < max_model_len:
            prompt["prompt_token_ids"] = stored.token_ids
        return conversation, [prompt]

    AnthropicServingMessages.count_tokens = count_tokens  # pyright: ignore[reportAttributeAccessIssue]
    AnthropicServingMessages.render_chat_request = render_chat_request


NOT_COMPILED = "the engine cannot compile it, or no text satisfies it"


async def with_marked_grammar(results: Any) -> AsyncIterator[Any]:
    """The engine's outputs. vLLM 0.33 raises an error of its own if it cannot compile a grammar."""
    from vllm.exceptions import VLLMValidationError

    async with contextlib.aclosing(results):
        try:
            async for result in results:
                yield result
        except VLLMValidationError as error:
            if not str(error).startswith("Invalid structured outputs"):
                raise
            raise bad_grammar(NOT_COMPILED) from error


def bad_grammar(reason: str) -> Exception:
    """The error of a request whose grammar the engine refuses; vLLM answers it with a 400. The server replaces the mark by
    the request's field."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(f"{GRAMMAR_MARK}: {reason}")


SOURCE_PREFIX = re.compile(r"\[[\d:]+\] \S+\.cc:\d+: ")
"""What xgrammar writes before a reason: the time and a line of its source, such as '[12:30:00] /src/grammar.cc:7: '."""


def name_bad_grammars() -> None:
    """Has vLLM's check of a grammar, which runs before sampling, give the reason of a refusal. A grammar in EBNF is refused if
    xgrammar cannot read it: guidance, which vLLM tries next, drops the first of two rules with one name."""
    import xgrammar
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    check = SamplingParams._validate_structured_outputs

    def checked(self: Any, *args: Any) -> None:
        grammar = self.structured_outputs.grammar if self.structured_outputs is not None else None
        try:
            if isinstance(grammar, str) and grammar.strip() and not grammar_is_likely_lark(grammar):
                xgrammar.Grammar.from_ebnf(grammar)
            check(self, *args)
        except (VLLMClientError, ValueError, RuntimeError) as error:
            reasons = [str(error.args[0] if error.args else error)]
            if error.__cause__ is not None and str(error.__cause__) not in reasons[0]:
                reasons.append(str(error.__cause__))
            reason = " ".join(SOURCE_PREFIX.sub("", " ".join(reasons)).split())
            raise bad_grammar(reason[:MAX_REASON]) from error

    SamplingParams._validate_structured_outputs = checked  # pyright: ignore[reportAttributeAccessIssue]


OPENINGS = ("response.created", "response.in_progress")
"""The events of /v1/responses that come before the engine has sampled anything."""
ERROR_EVENT = 'data: {"error":'


def begin_streams_late() -> None:
    """Has each stream begin with the engine's first output, so that what the engine refuses gets an error's status."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    # The class of /v1/messages is derived from the class of chat.
    OpenAIServingChat.create_chat_completion = with_first_event(OpenAIServingChat.create_chat_completion)
    OpenAIServingCompletion.create_completion = with_first_event(OpenAIServingCompletion.create_completion)
    OpenAIServingResponses.create_responses = with_first_event(OpenAIServingResponses.create_responses)


def with_first_event(create: Any) -> Any:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    @functools.wraps(create)
    async def create_and_begin(*args: Any, **options: Any) -> Any:
        events = await create(*args, **options)
        if not hasattr(events, "__anext__"):  # a whole answer or an error
            return events
        opening: list[Any] = []
        async for event in events:
            opening.append(event)
            if getattr(event, "type", None) not in OPENINGS:
                break
        # An error that vLLM (0.32) notices only in the stream is an event, after the status 200.
        if opening and isinstance(opening[0], str) and opening[0].startswith(ERROR_EVENT):
            return ErrorResponse.model_validate_json(opening[0].removeprefix("data: "))
        return joined(opening, events)

    return create_and_begin


async def joined(opening: Sequence[Any], others: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    async with contextlib.aclosing(others):
        for event in opening:
            yield event
        async for event in others:
            yield event


NO_TEMPLATE = (
    "messages: the base model has no chat template: send prompts to /v1/completions, or start the server with "
    "--chat-template FILE"
)
NO_TOOLS = (
    "tools: this base model's chat template renders no tools, or has no mark of a call that the engine can read: leave out "
    "`tools`, or start the server with --chat-template FILE or --engine-arg tool_call_parser=NAME"
)


def name_missing_parser() -> None:
    """Has vLLM's refusal of tools without a parser name the field, and the remedy with art-server. In /v1/responses vLLM would
    ignore the tools."""
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.renderers import online_renderer

    refuse = online_renderer.create_error_response
    create = OpenAIServingResponses.create_responses

    def refuse_with_remedy(message: str | Exception, *args: Any) -> Any:
        if "--tool-call-parser to be set" in str(message):  # flags of vLLM, which art-server does not have
            return refuse(NO_TOOLS, param="tools")
        return refuse(message, *args)

    async def create_responses(self: Any, request: Any, raw_request: Any = None) -> Any:
        has_parser = self.use_harmony or getattr(self.parser, "tool_parser_cls", None)
        has_tools = any(tool.type == "function" for tool in request.tools or ())
        if has_tools and request.tool_choice != "none" and not has_parser:
            return refuse(NO_TOOLS, param="tools")
        return await create(self, request, raw_request)

    online_renderer.create_error_response = refuse_with_remedy  # pyright: ignore[reportAttributeAccessIssue]
    OpenAIServingResponses.create_responses = create_responses


def name_missing_template() -> None:
    """Has the refusal of a conversation without a chat template name the field, and the remedies with art-server."""
    from vllm.renderers import hf

    apply = hf.safe_apply_chat_template

    @functools.wraps(apply)
    def applied(*args: Any, **options: Any) -> Any:
        try:
            return apply(*args, **options)
        except hf.ChatTemplateResolutionError:
            raise hf.ChatTemplateResolutionError(NO_TEMPLATE) from None

    hf.safe_apply_chat_template = applied


def send_no_half_surrogates() -> None:
    """Replaces halves of surrogate pairs in the arguments of tool calls, which a model can write as JSON escapes: a
    request that contains such a half cannot be encoded."""
    from vllm.entrypoints.generate.base import protocol

    for call_class in (protocol.FunctionCall, protocol.DeltaFunctionCall):
        replace_arguments(call_class)


def replace_arguments(call_class: Any) -> None:
    init = call_class.__init__

    def cleaned(self: Any, **fields: Any) -> None:
        if isinstance(arguments := fields.get("arguments"), str):
            fields["arguments"] = whole_characters(arguments)
        init(self, **fields)

    call_class.__init__ = cleaned


def remember_token_texts() -> None:
    """Caches the texts of tokens: vLLM decodes a token for each log-probability, in an eighth of this process's time."""
    from vllm.v1.engine import logprobs

    decode = logprobs.convert_ids_list_to_tokens

    @functools.cache
    def decode_one(tokenizer: Any, token_id: int) -> str:
        return decode(tokenizer, [token_id])[0]

    def decode_each(tokenizer: Any, token_ids: list[int]) -> list[str]:
        return [decode_one(tokenizer, token_id) for token_id in token_ids]

    logprobs.convert_ids_list_to_tokens = decode_each


class SecretCheck:
    """ASGI middleware that admits only requests with the secret of this start. The check calls the app itself, so no event of a
    stream passes through the check."""

    def __init__(self, app: Any, secret: str):
        self._app = app
        self._secret = secret.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            presented = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
            if not hmac.compare_digest(presented, self._secret):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        # A WebSocket: vLLM has one for speech, and the proxy uses none.
        elif scope["type"] != "lifespan":
            return
        await self._app(scope, receive, send)


def main() -> None:
    """Runs vLLM's API server with the wrapped engine client until it is stopped."""
    from vllm.entrypoints.launchers.api_server import entry

    from art_server.engine.vllm_process import whole_answers

    # vLLM's `entry.main` parses what is left of the command line.
    ledger = LedgerClient(sys.argv.pop(1))
    # Removed, because vLLM's other processes inherit the environment.
    secret = os.environ.pop(SECRET_SWITCH, None)
    serve_with_vllm = entry.build_and_serve

    async def build_and_serve(engine_client: Any, address: str, own: socket.socket, *args: Any, **kwargs: Any) -> Any:
        await ledger.connect()
        if PORT_SWITCH in os.environ:
            # Nobody uses vLLM's own socket, in the host's private folder.
            own = socket.socket(fileno=int(os.environ[PORT_SWITCH]))
        max_model_len = engine_client.model_config.max_model_len
        engine_client.generate = record_generate(engine_client.generate, ledger, max_model_len)
        count_exact_tokens(ledger, max_model_len)
        return await serve_with_vllm(engine_client, address, own, *args, **kwargs)

    build_with_vllm = entry.build_app

    def build_app(*args: Any, **kwargs: Any) -> Any:
        app = build_with_vllm(*args, **kwargs)
        app.user_middleware.clear()
        app.middleware_stack = None  # vLLM has built the stack already; the first request builds a new one
        if secret is not None:
            app.add_middleware(SecretCheck, secret=secret)
        return app

    name_missing_template()
    if RAW_SWITCH not in os.environ:
        plain_text.install()
    entry.build_app = build_app
    entry.build_and_serve = build_and_serve
    remember_token_texts()
    whole_answers.install()
    name_bad_grammars()
    name_missing_parser()
    begin_streams_late()
    send_no_half_surrogates()
    collect_seldom()
    entry.main()


if __name__ == "__main__":
    main()
