"""The content of a chat answer is text: control tokens that no parser reads are left out of the content.

vLLM decodes answers with control tokens for its parsers, because some parsers read them. So an end token that a request keeps
(`include_stop_str_in_output`), or passes (`ignore_eos`), would be part of the content. Here control tokens are left out where
an answer's tokens become text, before vLLM looks for stop strings; letters that spell a control token stay. A request with
`skip_special_tokens: false` gets all tokens. The ledger's records hold every token.
"""

import functools
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

ARGUMENT = "art_hidden_tokens"
"""The extra argument of a request's sampling parameters that names its set of hidden tokens."""

PARSERS = ("vllm.tool_parsers.", "vllm.reasoning.")
"""Where vLLM's parsers are."""

_hidden: dict[str, frozenset[int]] = {}
"""Hidden tokens, by the names of the parsers' classes."""


def hide(request: Any, tokenizer: Any, parsers: Sequence[Any]) -> None:
    """Has the answer to a request leave out the special tokens that none of the parsers reads."""
    name = " ".join(type(parser).__name__ for parser in parsers)
    if name not in _hidden:
        read = "\n".join(text for parser in parsers for text in _texts_read(parser))
        added = getattr(tokenizer, "added_tokens_decoder", {})  # Mistral's own tokenizers have none
        special = {number: token.content for number, token in added.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        # The source of a parser without a grammar may have a token inside a regular expression, escaped.
        _hidden[name] = frozenset(
            number for number, text in special.items() if text not in read and re.escape(text) not in read
        )
    request.vllm_xargs = {**(request.vllm_xargs or {}), ARGUMENT: name}


def _texts_read(parser: Any) -> Iterator[str]:
    """Texts that contain all marks for which a parser of vLLM looks: the marks of its grammar, or the source of a parser without a
    grammar."""
    for mark in ("reasoning_start_str", "reasoning_end_str"):
        yield getattr(parser, mark, None) or ""
    engine = getattr(parser, "_parser_engine", None)
    if engine is None:
        modules = {kind.__module__ for kind in type(parser).__mro__}
        yield from (inspect.getsource(sys.modules[name]) for name in modules if name.startswith(PARSERS))
        return
    config = engine.parser_engine_config
    yield from config.terminal_literals
    yield from config.token_id_terminals.values()
    yield from config.preserve_tokens


def install() -> None:
    """Has vLLM's detokenizers leave out hidden tokens."""
    from vllm.v1.engine import detokenizer

    for kind in (detokenizer.FastIncrementalDetokenizer, detokenizer.SlowIncrementalDetokenizer):
        _leave_out_hidden(kind)


def _leave_out_hidden(kind: Any) -> None:
    init, decode = kind.__init__, kind.decode_next

    @functools.wraps(init)
    def __init__(self: Any, tokenizer: Any, request: Any) -> None:
        init(self, tokenizer, request)
        name = (request.sampling_params.extra_args or {}).get(ARGUMENT)
        self.art_hidden = _hidden.get(name, frozenset()) if isinstance(name, str) else frozenset()

    @functools.wraps(decode)
    def decode_next(self: Any, next_token_id: int) -> str:
        return "" if next_token_id in self.art_hidden else decode(self, next_token_id)

    kind.__init__, kind.decode_next = __init__, decode_next
