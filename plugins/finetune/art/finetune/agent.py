"""One rollout with its reward. The requests of target functions belong to the rollout's session. The requests of other functions
belong to a second session."""

import hashlib
import traceback
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import art
from art.errors import error_text
from art.finetune.errors import RolloutFailed
from art.finetune.limits import TimeUp, limited
from art.finetune.masking import masked
from art.finetune.rows import DatasetRow
from art.finetune.scoring import Reward
from art.finetune.sections import LLM
from art.finetune.toolkit import innermost_function
from art.finetune.workflows import WORKFLOW, Call, Workflow, addresses
from art.sessions import NO_REQUEST, session_with_sampling
from art.tracebacks import own_frames
from art_protocol.wire import FailureBody

OTHER = ".other"
"""The ending of the name of the second session."""
REASON_CHARACTERS, TEXT_CHARACTERS = 300, 4000
"""Characters of a failure's reason, and of its whole text."""
FEWEST_SAME = 4
"""Fewer equal answers than this may be chance."""


class Played(NamedTuple):
    """A rollout with its reward."""

    trajectory: art.Trajectory
    output: Any
    """What the workflow returned."""
    reasons: dict[str, str]
    """Why evaluators gave their scores, by evaluator."""


Kept = Callable[
    [art.TrainableModel, DatasetRow, int, str, Callable[[], Awaitable[art.Trajectory]]],
    Coroutine[Any, Any, art.Trajectory],
]
"""Returns the trajectory of a rollout. Gets the model, the row, the number of the row's repetition, the session, and a function
that plays the rollout."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A workflow, and the reward of its rollouts."""

    workflow: Workflow
    reward: Reward
    llms: Mapping[str, LLM]
    policy: str | None
    """The policy's entry of `llms`."""
    targets: Container[str]
    """Functions whose requests are trained."""
    timeout_seconds: float
    is_seeded: bool
    """Whether a request without a seed gets a seed."""
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    """The policy's sampling parameters, which win over those of the workflow's requests."""

    async def play(
        self, model: art.TrainableModel, row: DatasetRow, session: str, seed: int
    ) -> tuple[art.Trajectory, Any]:
        """The trajectory of a rollout with its reward, and the workflow's output; see `play_with_reasons`."""
        trajectory, output, _ = await self.play_with_reasons(model, row, session, seed)
        return trajectory, output

    async def play_with_reasons(self, model: art.TrainableModel, row: DatasetRow, session: str, seed: int) -> Played:
        """A rollout with its reward; see `roll_out`."""
        trajectory, output = await self.roll_out(model, row, session, seed)
        reasons = await self.reward.score(row, output, trajectory)
        return Played(trajectory, output, reasons)

    async def roll_out(
        self, model: art.TrainableModel, row: DatasetRow, session: str, seed: int
    ) -> tuple[art.Trajectory, Any]:
        """The trajectory of a rollout without its reward, and the workflow's output. metrics["untrained_answers"] counts answers to
        other functions.

        Raises:
            Exception: the workflow failed, took too long, or asked for no answer of the model (in training: none that can be
                trained).
        """
        is_own = WORKFLOW in self.targets
        others: set[str] = set() if is_own else {WORKFLOW}
        own_session, other_session = (
            session_with_sampling(model, name, self.sampling) for name in (session, session + OTHER)
        )

        def session_of_request() -> str:
            name = innermost_function()
            if name in self.targets:
                return own_session
            others.add(name)
            return other_session

        step = step_of(model)
        async with art.rollout(model, session if is_own else session + OTHER, sampling=self.sampling) as rollout:
            call = Call(row, rollout, seed, addresses(self.llms, self.policy, model))
            try:
                with art.capture(session_of_request, step, seed if self.is_seeded else None):
                    output = await limited(self.workflow(call), self.timeout_seconds)
            except TimeUp as error:
                raise RolloutFailed(f"the rollout took {error}: raise eval.general.rollout_timeout_seconds") from error
        trained = rollout if is_own else art.rollout(model, session)
        trajectory = await trained.trajectory(metadata={"row": row.id})
        sessions = [trajectory]
        if others:
            sessions.append(await art.rollout(model, session + OTHER).trajectory())
            trajectory.metrics["untrained_answers"] = num_answers(sessions[-1])
        # An evaluation needs an answer, training needs an answer that can be trained.
        is_empty = not num_answers(trajectory) if step is None else not any(_is_answered(own, step) for own in sessions)
        if is_empty:
            left_out = others if trajectory.metrics.get("untrained_answers") else set[str]()
            raise RolloutFailed(_why_empty(model, left_out, trajectory.logs, is_trained=step is None))
        return trajectory, output

    def player(
        self, session: str, seed: int, kept: Kept | None = None
    ) -> Callable[[art.TrainableModel, DatasetRow], Coroutine[Any, Any, art.Trajectory]]:
        """The rollout function of an evaluation. The repetitions of a row have different seeds; the same repetition at another
        step has the same seed. `kept` returns the trajectory of a known repetition, or plays and keeps the repetition."""
        counts: Counter[tuple[str, str]] = Counter()

        async def play(model: art.TrainableModel, row: DatasetRow) -> art.Trajectory:
            case = model.get_inference_name(), row.id
            counts[case] += 1
            number, own = counts[case], f"{session}-{uuid.uuid4().hex[:12]}"

            async def fresh() -> art.Trajectory:
                trajectory, _ = await self.play(model, row, own, seed_of(seed, "val", row.id, number))
                return trajectory

            if kept is None:
                return await fresh()
            return await kept(model, row, number, own, fresh)

        return play


def _is_answered(trajectory: art.Trajectory, step: str) -> bool:
    """Whether the session of an evaluation has an answer of the evaluated model. Answers of the base model are in no trajectory:
    without them the trajectory's `logs` have a reason."""
    has_base_answers = step == "base" and not trajectory.logs
    return bool(num_answers(trajectory) or trajectory.metrics.get("unused_choices")) or has_base_answers


def _why_empty(model: art.TrainableModel, others: set[str], logs: list[str], *, is_trained: bool) -> str:
    """Why a trajectory has no answer. The trajectory's `logs` say whose answers its session has."""
    name = model.get_inference_name()
    if others:
        left_out = ", ".join(sorted(others))
        return f"all answers came from {left_out}, which finetuning.target_functions leaves out: add it there"
    if logs and NO_REQUEST not in logs[-1]:
        return logs[-1]
    fact = f"no answer of {name} can be trained" if is_trained else f"the session has no answer of {name}"
    return (
        f"{fact}: the workflow's requests went elsewhere. It has to ask "
        f"OPENAI_BASE_URL={model.inference_base_url} for OPENAI_MODEL={name}"
    )


def answers(trajectory: art.Trajectory) -> Iterator[Any]:
    """The sampled answers of all conversations, as choices of `openai`."""
    for history in (trajectory, *trajectory.additional_histories):
        yield from (entry for entry in history.messages_and_choices if not isinstance(entry, dict))


def num_answers(trajectory: art.Trajectory) -> int:
    """The number of sampled answers."""
    return sum(1 for _ in answers(trajectory))


def num_cut_answers(trajectory: art.Trajectory) -> int:
    """The number of answers that the token limit cut."""
    return sum(1 for answer in answers(trajectory) if answer.finish_reason == "length")


def share_same(trajectories: Iterable[art.Trajectory]) -> float:
    """The share of the rollouts that end with the most frequent last answer; 0 for fewer rollouts than `FEWEST_SAME`."""
    ends = [(list(answers(trajectory)) or [None])[-1] for trajectory in trajectories]
    texts = Counter(end.message.content for end in ends if end is not None and end.message.content)
    return max(texts.values(), default=0) / len(ends) if len(ends) >= FEWEST_SAME else 0.0


def step_of(model: art.TrainableModel) -> str | None:
    """The step that `art.evaluate` pins a copy of the model to, or "base": `demo/agent@2 -> "2"`. None: the newest step."""
    name = model.get_inference_name()
    return "base" if name == model.base_model else name.partition("@")[2] or None


def seed_of(*parts: object) -> int:
    """A number below 2^31 from the run's seed and from what names the rollout: epoch, row and generation."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def text_of(error: BaseException) -> str:
    """A failure with all lines of its message, such as the end of a program's stderr."""
    kind = type(error)
    message = error_text(error).encode(errors="backslashreplace").decode()  # files have no lone surrogates
    return _text_of(f"{kind.__module__}.{kind.__qualname__}", message)


def reason_of(error: BaseException) -> str:
    """A failure in one line: `ValueError: boom`."""
    return _first_line(text_of(error))


def line_of_failure(error: BaseException) -> str:
    """The line of the user's code that raised an error: ` (agent.py:12)`. Empty if an error has none."""
    frames = own_frames(error.__traceback__)
    if frames is None:
        return ""
    *_, last = traceback.walk_tb(frames)
    return f" ({Path(last[0].f_code.co_filename).name}:{last[1]})"


def reason_of_failure(failure: FailureBody) -> str:
    """The reason of a failure in a group, equal to `reason_of` the exception that the failure records."""
    return _first_line(_text_of(failure.type, failure.message))


def _text_of(kind: str, message: str) -> str:
    """A message behind the name of the error's class. Our own errors are sentences and need no name."""
    name = "" if kind.startswith("art.") else f"{kind.rpartition('.')[2]}: "
    return masked(f"{name}{message.strip()[:TEXT_CHARACTERS]}")


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")[:REASON_CHARACTERS]
