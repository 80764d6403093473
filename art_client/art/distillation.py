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

from tqdm.auto import tqdm

from art.errors import ArtError
from art.model import Model
from art.pool import run_all
from art.scopes import no_capture
from art.trajectories import History, Trajectory, TrajectoryGroup

H = TypeVar("H", bound=History)
Text: TypeAlias = tuple[int, ...]
"""The token ids of a whole conversation."""

MAX_ADVANTAGE = 5.0
"""A token that the teacher hardly ever says would otherwise outweigh all others of its step."""


class _Sampled(NamedTuple):
    """A sampled turn: everything that the student read, its tokens, and their log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    choice_id: str | None
    """Its `art.id`."""

    @property
    def identity(self) -> Hashable:
        """Equal for one sample that is in several branches."""
        return self.choice_id or (tuple(self.prompt), tuple(self.tokens), tuple(self.logprobs))


async def distill(
    groups: Iterable[TrajectoryGroup],
    teacher: Model,
    *,
    max_concurrent: int = 16,
    max_advantage: float = MAX_ADVANTAGE,
) -> list[TrajectoryGroup]:
    """The groups with an advantage for each sampled token: log p_teacher - log p_student, less the mean of this over the
    tokens that were sampled after the same text. Its mean over a trajectory's tokens is the metric "teacher_gap" (minus
    the reverse KL divergence, in nats a token).

    `teacher` is a registered model, one of its steps (`art.Model` with the name PROJECT/NAME@STEP), the base model, or any
    endpoint with the same tokenizer that answers `prompt_logprobs` on `/completions`, as vLLM does. Train the result with
    `model.train`: the advantages replace those from rewards, so equal rewards are no hindrance. Log-probabilities are at
    temperature 1 on both sides: sample at temperature 1. Differences and advantages are clamped to
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

    trajectories = {id(each): each for group in kept for each in group.trajectories}
    scores = _Scores(trajectories.values(), turns, scored, max_advantage)
    for group in kept:
        group.trajectories = [scores.applied(each) for each in group.trajectories]
    return kept


class _Scores:
    """The gaps of all turns, and the advantages from them. Histories are found by their `id`."""

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        turns: dict[int, list[_Sampled]],
        scored: dict[Text, list[float | None]],
        max_advantage: float,
    ) -> None:
        self._turns, self._max_advantage = turns, max_advantage
        self._gaps = {name: [_gaps(turn, scored) for turn in given] for name, given in turns.items()}
        self._means = _Means()
        for trajectory in trajectories:
            for turn, gaps in self._samples(trajectory):
                self._means.add(turn, self._bounded(gaps))

    def _samples(self, trajectory: Trajectory) -> list[tuple[_Sampled, list[float]]]:
        """The turns of a trajectory with their gaps; once each, though branches may share their first turns."""
        found: dict[Hashable, tuple[_Sampled, list[float]]] = {}
        for history in (trajectory, *trajectory.additional_histories):
            pairs = zip(self._turns[id(history)], self._gaps[id(history)], strict=True)
            for turn, gaps in pairs:
                found.setdefault(turn.identity, (turn, gaps))
        return list(found.values())

    def applied(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with advantages, and with its mean gap as a metric."""
        others = [self._advised(each) for each in trajectory.additional_histories]
        gaps = [gap for _, of_turn in self._samples(trajectory) for gap in of_turn]
        mean = {"teacher_gap": math.fsum(gaps) / len(gaps)} if gaps else {}
        update = {"additional_histories": others, "metrics": {**trajectory.metrics, **mean}}
        return self._advised(trajectory).model_copy(update=update)

    def _advised(self, history: H) -> H:
        pairs = zip(self._turns[id(history)], self._gaps[id(history)], strict=True)
        advantages = [self._bounded(self._means.centred(turn, self._bounded(gaps))) for turn, gaps in pairs]
        return history.model_copy(update={"turn_advantages": advantages})

    def _bounded(self, values: Iterable[float]) -> list[float]:
        """Before the mean is taken, too: one gap would otherwise give each of its siblings a large advantage."""
        return [max(-self._max_advantage, min(self._max_advantage, each)) for each in values]


class _Means:
    """The mean gap of the tokens that were sampled after the same text. Siblings' mean is a baseline: it depends on the
    text alone, so it takes noise from the gradient and adds no direction."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Hashable, ...], int] = {}
        """The text after a prompt, or after a text and one token more."""
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
        """The gaps less the mean of their siblings; those without siblings as they are."""
        found: list[float] = []
        for node, gap in zip(self._texts_before(turn), gaps, strict=True):
            siblings = self._gaps[node]
            found.append(gap - math.fsum(siblings) / len(siblings) if len(siblings) > 1 else gap)
        return found


async def _score(texts: Sequence[Text], teacher: Model, max_concurrent: int) -> dict[Text, list[float | None]]:
    """The teacher's log-probabilities of each text's tokens."""
    name, client = teacher.get_inference_name(), teacher.openai_client()
    slots = asyncio.Semaphore(max_concurrent)

    async def score(text: Text) -> list[float | None]:
        async with slots:
            found = await _prompt_logprobs(client, name, text)
        bar.update()
        return found

    with no_capture(), tqdm(total=len(texts), desc="teacher", unit="text") as bar:
        return dict(zip(texts, await run_all(map(score, texts)), strict=True))


def _gaps(turn: _Sampled, scored: dict[Text, list[float | None]]) -> list[float]:
    """log p_teacher - log p_student of a turn's tokens, from the scores of a text that begins with the turn.

    Raises:
        ArtError: it gave none for some of them.
    """
    whole = (*turn.prompt, *turn.tokens)
    known = scored[whole][len(turn.prompt) : len(whole)]
    values = [value for value in known if value is not None]
    if len(values) < len(turn.tokens):
        raise ArtError("the teacher gives no log-probability of some tokens: is its tokenizer another?")
    return [of_t - of_s for of_t, of_s in zip(values, turn.logprobs, strict=True)]


def _to_turns(entries: Iterable[Any]) -> Iterator[_Sampled]:
    """The sampled turns among messages and choices."""
    for entry in entries:
        fields = cast("dict[str, Any]", entry if isinstance(entry, dict) else entry.model_dump())
        if "finish_reason" in fields:
            yield _to_sampled(fields)


def _to_sampled(fields: dict[str, Any]) -> _Sampled:
    """The tokens that a choice carries.

    Raises:
        ValueError: it lacks some of them.
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
    return _Sampled(prompt, tokens, [float(each["logprob"]) for each in entries], mark.get("id"))


def _to_texts(turns: Iterable[_Sampled]) -> dict[Text, Text]:
    """For each turn's text the longest one that begins with it, so that each token is scored once."""
    texts: dict[Text, Text] = {}
    longest: Text = ()
    for text in sorted({(*turn.prompt, *turn.tokens) for turn in turns}, reverse=True):
        if longest[: len(text)] != text:  # sorted: a continuation comes just before
            longest = text
        texts[text] = longest
    return texts


async def _prompt_logprobs(client: Any, name: str, prompt: Sequence[int]) -> list[float | None]:
    """The log-probability of each token after those before it; None for the first.

    Raises:
        ArtError: the endpoint does not answer, or not with log-probabilities.
    """
    from openai import OpenAIError  # imported here, because it takes a second

    try:
        completion = await client.completions.create(
            model=name,
            prompt=list(prompt),
            max_tokens=1,
            temperature=0.0,
            extra_body={"prompt_logprobs": 0},
        )
    except OpenAIError as error:
        raise ArtError(f"teacher '{name}' does not answer: {error}") from error
    choice = completion.choices[0]
    extra: dict[str, Any] = choice.model_extra or {}
    found: list[Any] = extra.get("prompt_logprobs") or []
    if len(found) != len(prompt):
        raise ArtError(f"teacher '{name}' gives no prompt_logprobs: it must be served by vLLM")
    return [None if not entry else _logprob_of(entry, token) for entry, token in zip(found, prompt, strict=True)]


def _logprob_of(entry: dict[str, Any], token: int) -> float | None:
    value: Any = entry.get(str(token))
    logprob = cast("dict[str, Any]", value).get("logprob") if isinstance(value, dict) else None
    return float(logprob) if isinstance(logprob, int | float) else None
