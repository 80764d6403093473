"""`distill`: advantages from a teacher's log-probabilities of what the student sampled, or the teacher's likeliest tokens as
targets (on-policy distillation).

Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models" (arXiv:2306.13649), section 3, with the reverse KL
divergence KL(student || teacher), whose gradient is the policy gradient of these advantages.

With `teacher_messages` the teacher reads another prompt than the student, such as a prompt with what was wrong: distillation of
a model into itself. Sources: Hübotter et al. 2026, SDPO (arXiv:2601.20802), the loss in section 3 in its sampled-token form;
Shenfeld et al. 2026, SDFT (arXiv:2601.19897); Zhao et al. 2026, OPSD (arXiv:2601.18734).
"""

import asyncio
import base64
import itertools
import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from art.bars import make_bar
from art.core.model import Model
from art.entries import is_choice
from art.errors import ArtError
from art.pool import run_all
from art.scopes import no_capture
from art.trajectories import History, Trajectory, TrajectoryGroup, get_messages
from art.types import Messages, Tools
from art_protocol.teaching import MAX_ADVANTAGE
from art_protocol.wire import TeacherTop

H = TypeVar("H", bound=History)
Q = TypeVar("Q", bound=Hashable)
R = TypeVar("R")
Text: TypeAlias = tuple[int, ...]
"""The token ids of a whole conversation."""
Top: TypeAlias = list[tuple[int, float]]
"""Tokens with their log-probabilities, the likeliest first."""
Policy: TypeAlias = tuple[str, int]
"""A model and one of its steps."""
TeacherMessages: TypeAlias = Callable[[Messages, Trajectory, TrajectoryGroup], Messages | None]
"""The messages that the teacher reads before an answer. The arguments are the messages that the student read, and the answer's
trajectory and group. None: the answer is not distilled."""

TOO_LONG = re.compile("(context|model) length")
"""In vLLM's errors about a prompt that is too long."""

TOO_MANY = re.compile("prompt logprobs of .* max allowed")
"""In vLLM's errors about a `prompt_logprobs` above its `max_logprobs`."""


class _Sampled(NamedTuple):
    """A sampled turn: everything that the student read, the tokens that it sampled, and their log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    choice_id: str | None
    """The choice's `art.id`."""
    policy: Policy | None
    """The model and the step that sampled. None: unknown, or the base model."""
    read: list[int] | None
    """The tokens that the teacher reads before the sampled tokens. None: the turn is not distilled."""

    @property
    def text(self) -> Text | None:
        """What the teacher scores."""
        return None if self.read is None else (*self.read, *self.tokens)

    @property
    def identity(self) -> Hashable:
        """A key that is equal for the copies of one turn in several branches."""
        return self.choice_id or (tuple(self.prompt), tuple(self.tokens), tuple(self.logprobs))


class _Scored(NamedTuple):
    """A text's log-probabilities, with the model and the step that gave them (None: unknown, or the base model)."""

    logprobs: list[float | None]
    policy: Policy | None
    tops: list[Top]
    """At each token of the text the likeliest tokens and the token itself; empty unless they were asked for."""


async def distill(
    groups: Iterable[TrajectoryGroup],
    teacher: Model,
    *,
    teacher_messages: TeacherMessages | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_concurrent: int = 16,
    max_advantage: float = MAX_ADVANTAGE,
    top_k: int | None = None,
) -> list[TrajectoryGroup]:
    """The groups with an advantage for each sampled token: its gap, log p_teacher - log p_student, less the mean gap of the
    tokens that were sampled after the same text. The mean gap of a trajectory's tokens is its metric "teacher_gap" (minus
    the reverse KL divergence, in nats a token).

    `teacher` is a registered model, one of its steps (`art.Model` with the name PROJECT/NAME@STEP), the base model, or any
    endpoint with the same tokenizer that answers `prompt_logprobs` on `/completions`, as vLLM does. Train the result with
    `model.train`: these advantages replace the advantages from rewards, so equal rewards are no hindrance. Log-probabilities
    are at temperature 1 on both sides: sample at temperature 1. Gaps and advantages are clamped to
    [-max_advantage, max_advantage].

    With `teacher_messages` the teacher reads other messages than the student, such as the question with what was wrong
    (`art.with_feedback`), and then the same sampled tokens. So the model itself, or one of its earlier steps, can be the
    teacher. The function is called for each sampled turn with the messages before the turn, the trajectory and its group. The
    advantages are the clamped gaps themselves, without a mean: siblings with other feedback have other teachers, and siblings
    with the same wrong answer would have no advantage. A turn for which the function returns None has the advantage 0, and so
    has every turn whose teacher is the step that sampled and reads the same tokens. `chat_template_kwargs` are those of the
    rollout's requests, for example {"enable_thinking": False}.

    With `top_k` each sampled token gets a target in place of an advantage (`turn_targets`; all `turn_advantages` are 0): the
    teacher's log-probabilities of `top_k` tokens. The train call brings the student's whole distribution closer to the target
    (`TrainConfig.distill_alpha`, `distill_clip`), not only the probability of the token that was sampled. The tokens are the
    teacher's likeliest, the last of which gives way to the sampled token where that is none of them; the trainer computes the
    student's probabilities of the same tokens, and one entry for the rest, on both sides. SDPO takes the student's likeliest
    tokens. A server gives probabilities of a text's own tokens and of the likeliest alone, so the teacher's probabilities of
    other tokens of the student are not known. vLLM gives at most 20 tokens; `art-server --engine-arg max_logprobs=100` raises
    this. `max_advantage` has no effect then.

    Raises:
        ValueError: a sampled choice has no token ids or log-probabilities: sample with `model.openai_client()` and
            `logprobs=True`. Or `max_concurrent` or `top_k` is below 1. Or `teacher_messages` returns no messages, or the answer too.
        ArtError: the teacher does not answer, or gives no log-probabilities. Or what the teacher reads is longer than its
            context: nothing is cut, because a cut would take the question away.
    """
    if max_concurrent < 1:
        raise ValueError(f"max_concurrent must be at least 1, not {max_concurrent}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    groups = list(groups)
    turns = {id(history): list(_to_turns(history)) for _, _, history in _histories(groups)}
    asked = _Teacher(teacher, max_concurrent, top_k)
    if teacher_messages is not None:
        turns = await _with_teacher_prompts(groups, turns, asked, teacher_messages, chat_template_kwargs)
    texts = _to_texts(itertools.chain.from_iterable(turns.values()))
    scored = await asked.score(list(dict.fromkeys(texts.values())))
    scored = {whole: scored[text] for whole, text in texts.items()}

    kept = [group.model_copy() for group in groups]
    # By id: a trajectory that is in several groups counts once.
    trajectories = {id(trajectory): trajectory for group in kept for trajectory in group.trajectories}
    scores = _Scores(
        trajectories.values(), turns, scored, max_advantage, is_centred=teacher_messages is None, top_k=top_k
    )
    for group in kept:
        group.trajectories = [scores.applied(trajectory) for trajectory in group.trajectories]
    return kept


class _Scores:
    """The gaps of all turns, and the advantages from these gaps. The keys of `turns` are the `id`s of histories."""

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        turns: dict[int, list[_Sampled]],
        scored: dict[Text, _Scored],
        max_advantage: float,
        is_centred: bool,
        top_k: int | None,
    ) -> None:
        self._turns, self._max_advantage = turns, max_advantage
        self._targets: dict[int, list[TeacherTop | None]] = {}
        if top_k is not None:
            self._targets = {
                history_id: [_to_target(turn, scored, top_k) for turn in history_turns]
                for history_id, history_turns in turns.items()
            }
        gaps_of = _gaps if is_centred else _own_gaps
        self._gaps = {
            history_id: [gaps_of(turn, scored) for turn in history_turns] for history_id, history_turns in turns.items()
        }
        self._means = _Means()
        for trajectory in trajectories if is_centred else ():
            for turn, gaps in self._samples(trajectory):
                self._means.add(turn, self._bounded(gaps))

    def _samples(self, trajectory: Trajectory) -> list[tuple[_Sampled, list[float]]]:
        """The turns of a trajectory with their gaps. A turn that several branches share appears once."""
        samples: dict[Hashable, tuple[_Sampled, list[float]]] = {}
        for history in (trajectory, *trajectory.additional_histories):
            pairs = zip(self._turns[id(history)], self._gaps[id(history)], strict=True)
            for turn, gaps in pairs:
                samples.setdefault(turn.identity, (turn, gaps))
        return list(samples.values())

    def applied(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with advantages, and with its mean gap as a metric."""
        others = [self._with_advantages(history) for history in trajectory.additional_histories]
        samples = self._samples(trajectory)
        gaps = [gap for turn, turn_gaps in samples if turn.read is not None for gap in turn_gaps]
        mean = {"teacher_gap": math.fsum(gaps) / len(gaps)} if gaps else {}
        update = {"additional_histories": others, "metrics": {**trajectory.metrics, **mean}}
        return self._with_advantages(trajectory).model_copy(update=update)

    def _with_advantages(self, history: H) -> H:
        if self._targets:
            advantages = [[0.0] * len(turn.tokens) for turn in self._turns[id(history)]]
            targets = self._targets[id(history)]
            return history.model_copy(update={"turn_advantages": advantages, "turn_targets": targets})
        pairs = zip(self._turns[id(history)], self._gaps[id(history)], strict=True)
        advantages = [self._bounded(self._means.centred(turn, self._bounded(gaps))) for turn, gaps in pairs]
        return history.model_copy(update={"turn_advantages": advantages})

    def _bounded(self, values: Iterable[float]) -> list[float]:
        """The values, clamped. Gaps are clamped before their mean is taken, too: one large gap would otherwise give each
        of its siblings a large advantage."""
        return [max(-self._max_advantage, min(self._max_advantage, value)) for value in values]


class _Means:
    """The mean gap of siblings, which are the tokens that were sampled after the same text. This mean is a baseline: the
    mean depends on the text alone, and so takes noise from the gradient and adds no direction."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Hashable, ...], int] = {}
        """A number for each text: a prompt, or a text with a number and one token more."""
        self._gaps: defaultdict[int, list[float]] = defaultdict(list)

    def _texts_before(self, turn: _Sampled) -> Iterator[int]:
        node = self._nodes.setdefault(("prompt", tuple(turn.prompt)), len(self._nodes))
        for token in turn.tokens:
            yield node
            node = self._nodes.setdefault((node, token), len(self._nodes))

    def add(self, turn: _Sampled, gaps: Sequence[float]) -> None:
        for node, gap in zip(self._texts_before(turn), gaps, strict=True):
            self._gaps[node].append(gap)

    def centred(self, turn: _Sampled, gaps: Sequence[float]) -> list[float]:
        """The gaps, each less the mean gap of its siblings. A gap without siblings is unchanged."""
        centred: list[float] = []
        for node, gap in zip(self._texts_before(turn), gaps, strict=True):
            siblings = self._gaps[node]
            centred.append(gap - math.fsum(siblings) / len(siblings) if len(siblings) > 1 else gap)
        return centred


class _Teacher:
    """The teacher's answers, `max_concurrent` at a time."""

    def __init__(self, model: Model, max_concurrent: int, top_k: int | None) -> None:
        self._top_k = top_k or 0
        self._name, self._client = model.get_inference_name(), model.openai_client()
        self._slots = asyncio.Semaphore(max_concurrent)

    async def score(self, texts: Sequence[Text]) -> dict[Text, _Scored]:
        """The teacher's log-probabilities of each text's tokens."""
        return await self._answers(
            texts, lambda text: _prompt_logprobs(self._client, self._name, text, self._top_k), "teacher"
        )

    async def render(self, requests: Sequence[str]) -> dict[str, list[int]]:
        """The tokens of each chat request's prompt. The requests are JSON."""
        return await self._answers(requests, lambda request: _prompt(self._client, self._name, request), "prompts")

    async def _answers(self, asked: Sequence[Q], ask: Callable[[Q], Awaitable[R]], name: str) -> dict[Q, R]:
        async def answer(question: Q) -> R:
            async with self._slots:
                result = await ask(question)
            bar.update()
            return result

        # The teacher may be a model of the same server, whose answers would become a part of the rollout's session.
        with no_capture(), make_bar(total=len(asked), desc=name, unit="text") as bar:
            return dict(zip(asked, await run_all(map(answer, asked)), strict=True))


async def _with_teacher_prompts(
    groups: Iterable[TrajectoryGroup],
    turns: dict[int, list[_Sampled]],
    teacher: _Teacher,
    teacher_messages: TeacherMessages,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[int, list[_Sampled]]:
    """The turns with what the teacher reads before each of them."""
    requests: dict[int, list[str | None]] = {}
    for group, trajectory, history in _histories(groups):
        requests[id(history)] = [
            _to_request(teacher_messages(messages, trajectory, group), history.tools, chat_template_kwargs)
            for messages in _messages_before(history)
        ]
    distinct = dict.fromkeys(itertools.chain.from_iterable(requests.values()))
    prompts: dict[str | None, list[int] | None] = {None: None}
    prompts.update(await teacher.render([request for request in distinct if request is not None]))
    return {
        history_id: [
            turn._replace(read=prompts[request]) for turn, request in zip(turns[history_id], of_history, strict=True)
        ]
        for history_id, of_history in requests.items()
    }


def _to_request(
    messages: Messages | None, tools: Tools | None, chat_template_kwargs: Mapping[str, Any] | None
) -> str | None:
    """The JSON of a chat request with these messages. None for None.

    Raises:
        ValueError: there are no messages, or they contain the answer.
    """
    if messages is None:
        return None
    if not messages:
        raise ValueError(
            "teacher_messages returned an empty list: return messages, or None for a turn that is not distilled"
        )
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "teacher_messages returned messages that end with an answer: end them before it, because the teacher reads the "
            "sampled answer behind them"
        )
    options = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
    return json.dumps({"messages": messages} | {name: value for name, value in options.items() if value})


def _histories(groups: Iterable[TrajectoryGroup]) -> Iterator[tuple[TrajectoryGroup, Trajectory, History]]:
    """All conversations, each once, with their trajectory and the first group of the trajectory."""
    seen: set[int] = set()
    for group in groups:
        for trajectory in group.trajectories:
            for history in (trajectory, *trajectory.additional_histories):
                if id(history) not in seen:
                    seen.add(id(history))
                    yield group, trajectory, history


def _messages_before(history: History) -> Iterator[Messages]:
    """For each sampled turn the messages before it."""
    entries = history.messages_and_choices
    for index, entry in enumerate(entries):
        if is_choice(entry):
            yield get_messages(entries[:index])


def _own_gaps(turn: _Sampled, scored: dict[Text, _Scored]) -> list[float]:
    """As `_gaps`, and 0 where nothing is to be learnt: without a teacher's prompt, or from the policy that sampled, which reads
    the same tokens. Its gap is rounding, which Adam would make a whole step of."""
    is_left_out = turn.text is None or _is_itself(turn, scored)
    return [0.0] * len(turn.tokens) if is_left_out else _gaps(turn, scored)


def _is_itself(turn: _Sampled, scored: dict[Text, _Scored]) -> bool:
    """Whether the turn's teacher is the policy that sampled the turn, and reads the same tokens."""
    text = turn.text
    return text is not None and turn.read == turn.prompt and turn.policy == scored[text].policy is not None


def _to_target(turn: _Sampled, scored: dict[Text, _Scored], top_k: int) -> TeacherTop | None:
    """The teacher's `top_k` likeliest tokens at each token of a turn. None where nothing is to be learnt (`_own_gaps`).

    Raises:
        ArtError: the teacher gave fewer tokens.
    """
    text = turn.text
    if text is None or _is_itself(turn, scored):
        return None
    tops = scored[text].tops[len(text) - len(turn.tokens) : len(text)]
    rows = [_chosen(top, token, top_k) for top, token in zip(tops, turn.tokens, strict=True)]
    fewest = min(map(len, rows))
    if fewest < top_k:
        raise ArtError(f"the teacher gives the log-probabilities of {fewest} tokens: lower top_k, which is {top_k}")
    pairs = [pair for row in rows for pair in row]
    ids = struct.pack(f"<{len(pairs)}i", *(token for token, _ in pairs))
    logprobs = struct.pack(f"<{len(pairs)}f", *(logprob for _, logprob in pairs))
    return TeacherTop(
        top_k=top_k, token_ids=base64.b64encode(ids).decode(), logprobs=base64.b64encode(logprobs).decode()
    )


def _chosen(top: Top, token: int, top_k: int) -> Top:
    """The likeliest `top_k` entries; if the token is none of them, it takes the place of the last."""
    chosen = top[:top_k]
    if token in (other for other, _ in chosen):
        return chosen
    return [*chosen[:-1], *(entry for entry in top if entry[0] == token)]


def _gaps(turn: _Sampled, scored: dict[Text, _Scored]) -> list[float]:
    """log p_teacher - log p_student of a turn's tokens, from the scores of a text that begins with the turn.

    Raises:
        ArtError: the teacher gave no log-probability for some tokens.
    """
    whole = turn.text
    assert whole is not None, "a turn that is not distilled has no gaps"
    known = scored[whole].logprobs[len(whole) - len(turn.tokens) : len(whole)]
    values = [value for value in known if value is not None]
    if len(values) < len(turn.tokens):
        raise ArtError("the teacher gives no log-probability of some tokens: is its tokenizer another?")
    return [teacher - student for teacher, student in zip(values, turn.logprobs, strict=True)]


def _to_turns(history: History) -> Iterator[_Sampled]:
    """The sampled turns of a conversation."""
    for entry in history.messages_and_choices:
        if is_choice(entry):
            yield _to_sampled(cast("dict[str, Any]", entry if isinstance(entry, dict) else entry.model_dump()))


def _to_sampled(fields: dict[str, Any]) -> _Sampled:
    """The tokens of a choice, with its prompt's tokens and its log-probabilities.

    Raises:
        ValueError: the choice lacks some of these.
    """
    logprobs: dict[str, Any] = fields.get("logprobs") or {}
    entries: list[dict[str, Any]] = logprobs.get("content") or []
    prompt: list[int] = fields.get("prompt_token_ids") or []
    tokens: list[int] = fields.get("token_ids") or []
    if not prompt or not tokens or len(entries) != len(tokens):
        raise ValueError(
            "distill: a choice has no token ids or log-probabilities: sample with `model.openai_client()` and "
            "`logprobs=True`"
        )
    mark: dict[str, Any] = fields.get("art") or {}
    logprob_values = [float(entry["logprob"]) for entry in entries]
    return _Sampled(prompt, tokens, logprob_values, mark.get("id"), _to_policy(mark), read=prompt)


def _to_policy(mark: Mapping[str, Any]) -> Policy | None:
    """The model and the step in a choice's `art`."""
    model, step = mark.get("model"), mark.get("step")
    return None if model is None or step is None else (model, step)


def _to_texts(turns: Iterable[_Sampled]) -> dict[Text, Text]:
    """For the text of each turn the longest text that begins with the turn's text, so that each token is scored once."""
    texts: dict[Text, Text] = {}
    longest: Text = ()
    for text in sorted({turn.text for turn in turns if turn.text is not None}, reverse=True):
        if longest[: len(text)] != text:  # in descending order the continuations of a text come just before the text
            longest = text
        texts[text] = longest
    return texts


async def _prompt(client: Any, name: str, request: str) -> list[int]:
    """The tokens of a chat request's prompt, as the teacher's server renders the messages.

    Raises:
        ArtError: the endpoint does not answer, or answers without the tokens.
    """
    body: dict[str, Any] = json.loads(request) | {"return_token_ids": True}
    messages = body.pop("messages")
    with _explained(name):
        completion = await client.chat.completions.create(
            model=name, messages=messages, max_tokens=1, temperature=0.0, extra_body=body
        )
    extra: dict[str, Any] = completion.model_extra or {}
    prompt = extra.get("prompt_token_ids")
    if not prompt:
        raise ArtError(f"teacher '{name}' gives no prompt_token_ids: it must be served by vLLM")
    return prompt


async def _prompt_logprobs(client: Any, name: str, prompt: Sequence[int], top_k: int) -> _Scored:
    """The log-probability of each token after the tokens before, None for the first token, and of the `top_k` likeliest tokens.

    Raises:
        ArtError: the endpoint does not answer, or answers without log-probabilities.
    """
    with _explained(name):
        completion = await client.completions.create(
            model=name,
            prompt=list(prompt),
            # vLLM samples at least one token.
            max_tokens=1,
            temperature=0.0,
            # Each prompt token with its own log-probability, and so many alternatives.
            extra_body={"prompt_logprobs": top_k},
        )
    choice = completion.choices[0]
    extra: dict[str, Any] = choice.model_extra or {}
    entries: list[Any] = extra.get("prompt_logprobs") or []
    if len(entries) != len(prompt):
        raise ArtError(f"teacher '{name}' gives no prompt_logprobs: it must be served by vLLM")
    logprobs = [None if not entry else _logprob_of(entry, token) for entry, token in zip(entries, prompt, strict=True)]
    tops = [_to_top(entry or {}) for entry in entries] if top_k else []
    return _Scored(logprobs, _to_policy(extra.get("art") or {}), tops)


def _to_top(entry: dict[str, Any]) -> Top:
    """The tokens of one position, the likeliest first."""
    pairs = ((int(token), _logprob_of(entry, int(token))) for token in entry)
    return sorted(((token, value) for token, value in pairs if value is not None), key=lambda pair: -pair[1])


@contextmanager
def _explained(name: str) -> Generator[None]:
    """Makes an error of the endpoint an ArtError, with the remedy where one is known."""
    from openai import OpenAIError  # imported here, because it takes a second

    try:
        yield
    except OpenAIError as error:
        sentence = f"teacher '{name}' does not answer: {error}"
        if TOO_LONG.search(str(error)):
            sentence += (
                ". What the teacher reads is longer than its context. Nothing is cut, because the question would be lost: shorten "
                "the feedback or the solution, or let teacher_messages return None for this trajectory"
            )
        if TOO_MANY.search(str(error)):
            sentence += ". Lower top_k, or start the teacher's server with --engine-arg max_logprobs=TOP_K"
        raise ArtError(sentence) from error


def _logprob_of(entry: dict[str, Any], token: int) -> float | None:
    # vLLM's keys are token ids, and keys of JSON are texts.
    value: Any = entry.get(str(token))
    logprob = cast("dict[str, Any]", value).get("logprob") if isinstance(value, dict) else None
    return float(logprob) if isinstance(logprob, int | float) else None
