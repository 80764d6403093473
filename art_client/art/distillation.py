"""`distill`: advantages from a teacher's log-probabilities of what the student sampled (on-policy distillation).

Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models" (arXiv:2306.13649), section 3, with the reverse KL
divergence KL(student || teacher), whose gradient is the policy gradient of these advantages.
"""

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from art.bars import make_bar
from art.core.model import Model
from art.errors import ArtError
from art.pool import run_all
from art.scopes import no_capture
from art.trajectories import History, Trajectory, TrajectoryGroup

H = TypeVar("H", bound=History)
Text: TypeAlias = tuple[int, ...]
"""The token ids of a whole conversation."""

MAX_ADVANTAGE = 5.0
"""A token to which the teacher gives almost no probability would otherwise outweigh all other tokens of the step."""


class _Sampled(NamedTuple):
    """A sampled turn: everything that the student read, the tokens that it sampled, and their log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    choice_id: str | None
    """The choice's `art.id`."""

    @property
    def identity(self) -> Hashable:
        """A key that is equal for the copies of one turn in several branches."""
        return self.choice_id or (tuple(self.prompt), tuple(self.tokens), tuple(self.logprobs))


async def distill(
    groups: Iterable[TrajectoryGroup],
    teacher: Model,
    *,
    max_concurrent: int = 16,
    max_advantage: float = MAX_ADVANTAGE,
) -> list[TrajectoryGroup]:
    """The groups with an advantage for each sampled token: its gap, log p_teacher - log p_student, less the mean gap of the
    tokens that were sampled after the same text. The mean gap of a trajectory's tokens is its metric "teacher_gap" (minus
    the reverse KL divergence, in nats a token).

    `teacher` is a registered model, one of its steps (`art.Model` with the name PROJECT/NAME@STEP), the base model, or any
    endpoint with the same tokenizer that answers `prompt_logprobs` on `/completions`, as vLLM does. Train the result with
    `model.train`: these advantages replace the advantages from rewards, so equal rewards are no hindrance. Log-probabilities
    are at temperature 1 on both sides: sample at temperature 1. Gaps and advantages are clamped to
    [-max_advantage, max_advantage].

    Raises:
        ValueError: a sampled choice has no token ids or log-probabilities: sample with `model.openai_client()` and
            `logprobs=True`. Or `max_concurrent` is below 1.
        ArtError: the teacher does not answer, or gives no log-probabilities.
    """
    if max_concurrent < 1:
        raise ValueError(f"max_concurrent must be at least 1, not {max_concurrent}")
    kept = [group.model_copy() for group in groups]
    turns: dict[int, list[_Sampled]] = {}
    for group in kept:
        for trajectory in group.trajectories:
            for history in (trajectory, *trajectory.additional_histories):
                turns[id(history)] = list(_to_turns(history.messages_and_choices))
    texts = _to_texts(itertools.chain.from_iterable(turns.values()))
    scored = await _score(list(dict.fromkeys(texts.values())), teacher, max_concurrent)
    scored = {whole: scored[text] for whole, text in texts.items()}

    # By id: a trajectory that is in several groups counts once.
    trajectories = {id(trajectory): trajectory for group in kept for trajectory in group.trajectories}
    scores = _Scores(trajectories.values(), turns, scored, max_advantage)
    for group in kept:
        group.trajectories = [scores.applied(trajectory) for trajectory in group.trajectories]
    return kept


class _Scores:
    """The gaps of all turns, and the advantages from these gaps. The keys of `turns` are the `id`s of histories."""

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        turns: dict[int, list[_Sampled]],
        scored: dict[Text, list[float | None]],
        max_advantage: float,
    ) -> None:
        self._turns, self._max_advantage = turns, max_advantage
        self._gaps = {
            history_id: [_gaps(turn, scored) for turn in history_turns] for history_id, history_turns in turns.items()
        }
        self._means = _Means()
        for trajectory in trajectories:
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
        gaps = [gap for _, turn_gaps in self._samples(trajectory) for gap in turn_gaps]
        mean = {"teacher_gap": math.fsum(gaps) / len(gaps)} if gaps else {}
        update = {"additional_histories": others, "metrics": {**trajectory.metrics, **mean}}
        return self._with_advantages(trajectory).model_copy(update=update)

    def _with_advantages(self, history: H) -> H:
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


async def _score(texts: Sequence[Text], teacher: Model, max_concurrent: int) -> dict[Text, list[float | None]]:
    """The teacher's log-probabilities of each text's tokens."""
    name, client = teacher.get_inference_name(), teacher.openai_client()
    slots = asyncio.Semaphore(max_concurrent)

    async def score(text: Text) -> list[float | None]:
        async with slots:
            logprobs = await _prompt_logprobs(client, name, text)
        bar.update()
        return logprobs

    # The teacher may be a model of the same server, whose answers would become a part of the rollout's session.
    with no_capture(), make_bar(total=len(texts), desc="teacher", unit="text") as bar:
        return dict(zip(texts, await run_all(map(score, texts)), strict=True))


def _gaps(turn: _Sampled, scored: dict[Text, list[float | None]]) -> list[float]:
    """log p_teacher - log p_student of a turn's tokens, from the scores of a text that begins with the turn.

    Raises:
        ArtError: the teacher gave no log-probability for some tokens.
    """
    whole = (*turn.prompt, *turn.tokens)
    known = scored[whole][len(turn.prompt) : len(whole)]
    values = [value for value in known if value is not None]
    if len(values) < len(turn.tokens):
        raise ArtError("the teacher gives no log-probability of some tokens: is its tokenizer another?")
    return [teacher - student for teacher, student in zip(values, turn.logprobs, strict=True)]


def _to_turns(entries: Iterable[Any]) -> Iterator[_Sampled]:
    """The sampled turns among messages and choices."""
    for entry in entries:
        fields = cast("dict[str, Any]", entry if isinstance(entry, dict) else entry.model_dump())
        if "finish_reason" in fields:
            yield _to_sampled(fields)


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
    return _Sampled(prompt, tokens, [float(entry["logprob"]) for entry in entries], mark.get("id"))


def _to_texts(turns: Iterable[_Sampled]) -> dict[Text, Text]:
    """For the text of each turn the longest text that begins with the turn's text, so that each token is scored once."""
    texts: dict[Text, Text] = {}
    longest: Text = ()
    for text in sorted({(*turn.prompt, *turn.tokens) for turn in turns}, reverse=True):
        if longest[: len(text)] != text:  # in descending order the continuations of a text come just before the text
            longest = text
        texts[text] = longest
    return texts


async def _prompt_logprobs(client: Any, name: str, prompt: Sequence[int]) -> list[float | None]:
    """The log-probability of each token after the tokens before; None for the first token.

    Raises:
        ArtError: the endpoint does not answer, or answers without log-probabilities.
    """
    from openai import OpenAIError  # imported here, because it takes a second

    try:
        completion = await client.completions.create(
            model=name,
            prompt=list(prompt),
            # vLLM samples at least one token.
            max_tokens=1,
            temperature=0.0,
            # No alternatives: each prompt token with its own log-probability.
            extra_body={"prompt_logprobs": 0},
        )
    except OpenAIError as error:
        raise ArtError(f"teacher '{name}' does not answer: {error}") from error
    choice = completion.choices[0]
    extra: dict[str, Any] = choice.model_extra or {}
    entries: list[Any] = extra.get("prompt_logprobs") or []
    if len(entries) != len(prompt):
        raise ArtError(f"teacher '{name}' gives no prompt_logprobs: it must be served by vLLM")
    return [None if not entry else _logprob_of(entry, token) for entry, token in zip(entries, prompt, strict=True)]


def _logprob_of(entry: dict[str, Any], token: int) -> float | None:
    # vLLM's keys are token ids, and keys of JSON are texts.
    value: Any = entry.get(str(token))
    logprob = cast("dict[str, Any]", value).get("logprob") if isinstance(value, dict) else None
    return float(logprob) if isinstance(logprob, int | float) else None
