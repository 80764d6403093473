"""Text stays text: what a message spells never becomes a control token of the prompt.

vLLM renders the chat template and reads the whole rendering for control tokens, also what messages brought into it: a
web page that spells `<|im_end|>` ends its turn. Here each piece of a message that spells a control token, or that
begins or ends like one, is replaced by a placeholder before the template is rendered. All control tokens that
the rendering then spells come from the template. A copy of the tokenizer encodes the rendering. The copy knows control tokens
under secret names only, so that the pieces of messages match no control token.

Conversations without such a piece take vLLM's own path. So do prompts of /v1/completions, which the program renders
itself; gpt-oss and Mistral's library, which read no control tokens in texts; and families that vLLM renders with code of
its own instead of a template (DeepSeek V3.2 and V4, Kimi K3, Cohere, Inkling).
"""

import asyncio
import functools
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

logger = logging.getLogger(__name__)

Spans = list[tuple[int, int]]
"""Start and end of parts of a text, in order."""

RESPELLINGS = (("x", ""), ("\n x \n", "\n \n"))
"""Two respellings of an answer: what replaces texts, and what replaces white space, between its marks. No template writes both
respellings."""


class ControlTokens:
    """The tokens of a model that structure its prompts, and how to encode a text that only spells them.

    These are the special tokens, and other added tokens that the template spells (`<think>`, `<tool_call>`; in some
    families the headers of turns). Other added tokens (runs of spaces, HTML tags) are ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str):
        self._tokenizer = tokenizer
        self._added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        self.ids: dict[str, int] = {}
        """The ids of control tokens, by their texts."""
        for number, token in self._added.items():
            is_control = token.content.strip() and (token.special or token.content in template)
            if is_control and _is_recognised_inside(tokenizer, number, token):
                self.ids[token.content] = number
        self.in_template = frozenset(text for text in self.ids if text in template)
        self._of_thinking = frozenset(text for text in self.in_template if "think" in text.lower())
        """The marks of thinking: `<think>`, `[/THINK]`, `<seed:think>`."""
        self._pattern = re.compile(_any_of(self.ids))
        self._openings: set[str] = set()
        self._closings: set[str] = set()
        for text in self.ids:
            for size in range(1, len(text)):
                self._openings.add(text[:size])
                self._closings.add(text[-size:])
        self._first = frozenset(text[0] for text in self.ids)
        self._last = frozenset(text[-1] for text in self.ids)
        self._longest = max(map(len, self.ids), default=0)

    def spelled(self, text: str) -> Spans:
        """The pieces of a text that spell a control token, or that may be a part of a control token across an end of the text."""
        spans = [match.span() for match in self._pattern.finditer(text)] if self.ids else []
        start = len(text) - len(text.lstrip())  # templates strip white space
        end = len(text.rstrip())
        first, last = (spans[0][0], spans[-1][1]) if spans else (end, start)
        tail = text[max(last, end - self._longest) : end]
        opening = self._longest_end(tail)
        if opening:
            spans.append((end - opening, end))
            first = min(first, end - opening)
        head = text[start : min(first, start + self._longest)]
        closing = self._longest_beginning(head)
        if closing:
            spans.insert(0, (start, start + closing))
        return spans

    def thinking_marks(self, content: Any) -> frozenset[str]:
        """The marks of thinking in the content of an answer; none if no mark in it ends thinking."""
        spelled = (text[start:end] for text in _strings(content) for start, end in self.spelled(text))
        marks = self._of_thinking.intersection(spelled)
        return marks if any("/" in mark for mark in marks) else frozenset()

    def respell(self, text: str, word: str, space: str) -> str:
        """A text with the same control tokens, between which `word` replaces text, and `space` white space:
        '<b>hi</b> <b>' -> '<b>word</b>space<b>'. A text without control tokens stays as it is."""
        tokens = self._pattern.findall(text)
        if not tokens:
            return text
        respelled = ""
        for piece, token in zip(self._pattern.split(text), [*tokens, ""], strict=True):
            if piece:
                respelled += word if piece.strip() else space
            respelled += token
        return respelled

    def _longest_end(self, text: str) -> int:
        """The length of the longest end of a text with which a control token begins: 'ab<|im' -> 4 for `<|im_end|>`."""
        if self._first.isdisjoint(text):
            return 0
        return next((size for size in range(len(text), 0, -1) if text[-size:] in self._openings), 0)

    def _longest_beginning(self, text: str) -> int:
        """The length of the longest beginning of a text with which a control token ends: 'end|>ab' -> 5 for `<|im_end|>`."""
        if self._last.isdisjoint(text):
            return 0
        return next((size for size in range(len(text), 0, -1) if text[:size] in self._closings), 0)

    def encode(self, rendering: "MarkedRendering", add_special_tokens: bool) -> list[int]:
        """The tokens of a rendering in which the texts of messages are text."""
        copy = self._copy
        marked = self._pattern.sub(lambda match: copy.names[match[0]], rendering.marked)
        encoding = copy.encode(rendering.held.restore(marked))
        if not copy.leaks.isdisjoint(encoding.ids):
            encoding = copy.encode(rendering.held.restore(marked, copy.between))
        framed = copy.frame(encoding, add_special_tokens)
        token_ids: list[int] = []
        for number, is_added in zip(framed.ids, framed.special_tokens_mask, strict=True):
            if is_added:
                token_ids.append(number)
            elif number != copy.between_id:
                token_ids.append(copy.numbers.get(number, number))
        return token_ids

    @functools.cached_property
    def _copy(self) -> "_Renamed":
        return _Renamed(self._tokenizer, self._added, self.ids)


class _Renamed:
    """A copy of a tokenizer that knows control tokens under secret names only."""

    def __init__(self, tokenizer: Tokenizer, added: Mapping[int, AddedToken], control: Mapping[str, int]):
        # Private-use characters are in no pre-tokenizer's class of letters, and no normalizer changes them.
        secret = secrets.token_hex(8)
        self.names = {text: f"\ue000{secret}{number}\ue001" for text, number in control.items()}
        """The secret names of control tokens, by their texts."""
        self.between = f"\ue000{secret}\ue001"
        """The name of a token that splits a text and is left out."""
        self._tokenizer = Tokenizer(tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(tokenizer, part) is not None:
                setattr(self._tokenizer, part, getattr(tokenizer, part))
        contents = {number: self.names.get(token.content, token.content) for number, token in added.items()}
        tokens = [
            AddedToken(
                contents[number],
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=token.normalized,
                special=token.special,
            )
            for number, token in added.items()
        ]
        self._tokenizer.add_tokens([*tokens, AddedToken(self.between, normalized=False)])
        find = self._tokenizer.token_to_id
        self.numbers = {find(content): number for number, content in contents.items()}
        """The tokenizer's ids of added tokens, by the copy's ids."""
        self.between_id = find(self.between)
        in_model = (tokenizer.model.token_to_id(text) for text in control)
        self.leaks = frozenset(number for number in in_model if number is not None)
        """Ids that the model's own vocabulary has for the texts of control tokens."""

    def encode(self, text: str) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def frame(self, encoding: Encoding, add_special_tokens: bool) -> Encoding:
        """An encoding with the tokens that the tokenizer adds around a text, if `add_special_tokens` asks for these tokens."""
        return self._tokenizer.post_process(encoding, add_special_tokens=add_special_tokens)


class Held:
    """Pieces of messages that spell control tokens, and the placeholders that stand for them in a rendering."""

    def __init__(self, control: ControlTokens):
        self._control = control
        self._texts: list[str] = []
        # Letters and digits: no template or JSON changes them. Random: no message can spell a placeholder.
        self._secret = f"x{secrets.token_hex(8)}"

    def hold(self, value: Any, spared: frozenset[str] = frozenset()) -> Any:
        """A copy of a value from JSON with placeholders in its strings, except for the control tokens in `spared`."""
        return _with_strings(value, lambda text: self._hold_text(text, spared))

    def _hold_text(self, text: str, spared: frozenset[str]) -> str:
        marked, position = "", 0
        for start, end in self._control.spelled(text):
            piece = text[start:end]
            if piece not in spared:
                marked += f"{text[position:start]}{self._secret}n{len(self._texts)}x"
                position = end
                self._texts.append(piece)
        return marked + text[position:]

    def restore(self, marked: str, between: str = "") -> str:
        """A text with the pieces in place of their placeholders, each with `between` behind its first character."""

        def piece(match: re.Match[str]) -> str:
            text = self._texts[int(match[1])]
            return text[0] + between + text[1:]

        return re.sub(rf"{self._secret}n(\d+)x", piece, marked)


class MarkedRendering(str):
    """A rendered conversation in which messages spell control tokens."""

    control: ControlTokens
    held: Held
    marked: str
    """The rendering with placeholders."""

    @classmethod
    def make(cls, marked: str, held: Held, control: ControlTokens) -> "MarkedRendering":
        rendering = cls(held.restore(marked))
        rendering.marked, rendering.held, rendering.control = marked, held, control
        return rendering

    def token_ids(self, add_special_tokens: bool) -> list[int]:
        return self.control.encode(self, add_special_tokens)


def render(control: ControlTokens, apply: Callable[..., str], inputs: Mapping[str, Any]) -> str:
    """The rendering of a template's `inputs` (`conversation`, `tools` and others) by `apply`; a `MarkedRendering` if a string
    in the inputs spells a control token.

    Two kinds of marks keep their meaning in the content of an answer: the marks of thinking that the answer ends, and marks for
    which the template looks in answers.
    """
    if not any(control.spelled(text) for text in _strings(inputs)):
        return apply(**inputs)
    marks: set[str] = set()
    for message in inputs["conversation"]:
        if message["role"] == "assistant":
            content = message.get("content")
            spelled = {text[start:end] for text in _strings(content) for start, end in control.spelled(text)}
            marks |= control.in_template.intersection(spelled) - control.thinking_marks(content)
    return _render_with(control, apply, inputs, _looked_for(control, apply, inputs, frozenset(marks)))


def _render_with(
    control: ControlTokens, apply: Callable[..., str], inputs: Mapping[str, Any], spared: frozenset[str]
) -> MarkedRendering:
    """A rendering in which the contents of answers keep the meaning of their thinking and of the control tokens in `spared`."""
    held = Held(control)
    conversation = []
    for message in inputs["conversation"]:
        copied = held.hold(message)
        content = message.get("content")
        if message["role"] == "assistant" and (own := spared | control.thinking_marks(content)):
            copied["content"] = held.hold(content, own)
        conversation.append(copied)
    others = held.hold({name: value for name, value in inputs.items() if name != "conversation"})
    return MarkedRendering.make(apply(conversation=conversation, **others), held, control)


def _looked_for(
    control: ControlTokens,
    apply: Callable[..., str],
    inputs: Mapping[str, Any],
    marks: frozenset[str],
) -> frozenset[str]:
    """The marks in answers for which the template looks: if such a mark is protected, the rendering changes.

    A template that reads a mark may write the same text back, if the answer has the template's own spelling. So renderings of
    answers in other spellings are compared (`RESPELLINGS`).
    """

    def in_spelling(word: str, space: str) -> Callable[[frozenset[str]], str]:
        def respell(text: str) -> str:
            return control.respell(text, word, space)

        conversation = [
            {**message, "content": _with_strings(message.get("content"), respell)}
            if message["role"] == "assistant"
            else message
            for message in inputs["conversation"]
        ]
        respelled = {**inputs, "conversation": conversation}
        return functools.cache(lambda spared: str(_render_with(control, apply, respelled, spared)))

    def matters(text_with: Callable[[frozenset[str]], str], mark: str) -> bool:
        """Whether protecting the mark changes a rendering: beside the other marks, or alone."""
        if text_with(marks - {mark}) != text_with(marks):
            return True
        return text_with(frozenset({mark})) != text_with(frozenset())

    spellings = [in_spelling(*respelling) for respelling in RESPELLINGS] if marks else []
    return frozenset(mark for mark in marks if any(matters(spelling, mark) for spelling in spellings))


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value from JSON with changed strings, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_strings(key, change): _with_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_strings(item, change) for item in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    """All strings of a value from JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _is_recognised_inside(tokenizer: Tokenizer, number: int, token: AddedToken) -> bool:
    """Whether the tokenizer recognises an added token between other letters."""
    if token.single_word:
        return False
    return not token.normalized or number in _ids(tokenizer, f"a{token.content}a")


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _any_of(texts: Iterable[str]) -> str:
    """A pattern that matches the longest of `texts`: ('ab', 'ac') -> '(?:a(?:b|c))'. A common beginning is tried once, because
    some models have 6,000 tokens."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        branches = [re.escape(key) + write(below) for key, below in node.items() if key]
        if not branches:
            return ""
        return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")

    return write(tree)


def install() -> None:
    """Wraps vLLM's rendering and tokenisation of conversations."""
    from transformers import TokenizersBackend
    from vllm.renderers import base, hf

    apply_with_vllm = hf.safe_apply_chat_template
    known: dict[tuple[int, str | None, bool], ControlTokens | None] = {}

    def control_of(model_config: Any, tokenizer: Any, inputs: Mapping[str, Any]) -> ControlTokens | None:
        """The control tokens for a request; None if vLLM refuses the request, or the tokenizer cannot be copied."""
        tools, requested = inputs.get("tools"), inputs.get("chat_template")
        key = (id(tokenizer), requested, tools is None)
        if key not in known:
            template = hf.resolve_chat_template(tokenizer, requested, tools, model_config=model_config)
            control = None
            if template is not None and isinstance(tokenizer, TokenizersBackend):
                control = ControlTokens(tokenizer.backend_tokenizer, template)
            elif template is not None:
                logger.warning(
                    "tokenizer %r cannot be copied: texts of messages are read as vLLM reads them",
                    tokenizer,
                )
            known[key] = control
        return known[key]

    @functools.wraps(apply_with_vllm)
    def apply(model_config: Any, tokenizer: Any, conversation: Any, **options: Any) -> Any:
        applied = functools.partial(apply_with_vllm, model_config, tokenizer)
        control = control_of(model_config, tokenizer, options)
        # With `tokenize` the result is token ids, in which no placeholder could be replaced.
        if control is None or options.get("tokenize", True):
            return applied(conversation, **options)
        template = options.pop("chat_template", None)
        applied = functools.partial(applied, chat_template=template)
        return render(control, applied, {"conversation": conversation, **options})

    hf.safe_apply_chat_template = apply

    def with_ids(prompt: Any, params: Any) -> Any:
        text = prompt.get("prompt")
        if not isinstance(text, MarkedRendering):
            return prompt
        # vLLM (0.32, renderers/base.py) does not tokenise a prompt that has token ids.
        ids = text.token_ids(params.add_special_tokens)
        return {**prompt, "prompt": str(text), "prompt_token_ids": ids}

    renderer = base.BaseRenderer
    tokenize, tokenize_async = (
        renderer._tokenize_singleton_prompt,
        renderer._tokenize_singleton_prompt_async,
    )

    @functools.wraps(tokenize)
    def tokenized(self: Any, prompt: Any, params: Any) -> Any:
        return tokenize(self, with_ids(prompt, params), params)

    @functools.wraps(tokenize_async)
    async def tokenized_async(self: Any, prompt: Any, params: Any) -> Any:
        if isinstance(prompt.get("prompt"), MarkedRendering):
            # In a thread, because one event loop of vLLM's API process sends all streams.
            prompt = await asyncio.to_thread(with_ids, prompt, params)
        return await tokenize_async(self, prompt, params)

    renderer._tokenize_singleton_prompt = tokenized
    renderer._tokenize_singleton_prompt_async = tokenized_async
