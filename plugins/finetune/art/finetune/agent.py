"""One rollout with its reward. The requests of target functions belong to the rollout's session, those of other functions to a
session beside it."""

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import art
from art.finetune.rows import Row
from art.finetune.scoring import Reward
from art.finetune.sections import LLM
from art.finetune.workflows import WORKFLOW, Call, Workflow, addresses

OTHER = ".other"
REASON_CHARACTERS = 300


class RolloutFailed(Exception):
    """A rollout without a reward; the message has the reason and the remedy."""


class Sessions:
    """The two sessions of a rollout."""

    def __init__(self, name: str, targets: Container[str], function_name: Callable[[], str]) -> None:
        self.trained, self.other = name, name + OTHER
        self._targets, self._function_name = targets, function_name
        self.other_functions: set[str] = set()
        """Functions that are no targets, whose requests were captured in this process."""

    def of_workflow(self) -> str:
        """The session of requests outside of all functions, and of all requests to the rollout's own address."""
        return self.trained if WORKFLOW in self._targets else self.other

    def of_request(self) -> str:
        """The session of a request in this context."""
        name = self._function_name()
        if name in self._targets:
            return self.trained
        self.other_functions.add(name)
        return self.other


@dataclass(frozen=True, slots=True)
class Agent:
    """A workflow, and what its rollouts are worth."""

    workflow: Workflow
    reward: Reward
    llms: Mapping[str, LLM]
    policy: str | None
    """The policy's entry of `llms`."""
    targets: Container[str]
    """Functions whose requests are trained."""
    timeout_seconds: float

    async def play(self, model: art.TrainableModel, row: Row, session: str, seed: int) -> tuple[art.Trajectory, Any]:
        """A rollout's trajectory with its reward, and its output. metrics["untrained_answers"] counts answers to other
        functions.

        Raises:
            Exception: the workflow or an evaluator failed, took too long, or asked for no answer that can be trained.
        """
        sessions = Sessions(session, self.targets, self.workflow.function_name)
        async with art.rollout(model, sessions.of_workflow()) as rollout:
            call = Call(row, rollout, seed, addresses(self.llms, self.policy, rollout))
            limit = asyncio.timeout(self.timeout_seconds)
            try:
                with art.capture(sessions.of_request, step_of(model)):
                    async with limit:
                        output = await self.workflow(call)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise RolloutFailed(
                    f"the rollout took longer than {self.timeout_seconds:g} s: raise eval.general.rollout_timeout_seconds"
                ) from error
        trajectory = await self._collect(rollout, sessions, is_trained=step_of(model) is None)
        trajectory.metadata["id"] = row.id
        await self.reward.score(row, output, trajectory)
        return trajectory, output

    def player(
        self, session: str, seed: int
    ) -> Callable[[art.TrainableModel, Row], Coroutine[Any, Any, art.Trajectory]]:
        """The rollout function of an evaluation. A row's repetitions have different seeds, partners the same."""
        counts: Counter[tuple[str, str]] = Counter()

        async def play(model: art.TrainableModel, row: Row) -> art.Trajectory:
            case = model.get_inference_name(), row.id
            counts[case] += 1
            own = f"{session}-{uuid.uuid4().hex[:12]}"
            trajectory, _ = await self.play(model, row, own, seed_of(seed, "val", row.id, counts[case]))
            return trajectory

        return play

    async def _collect(self, rollout: art.Rollout, sessions: Sessions, *, is_trained: bool) -> art.Trajectory:
        model = rollout.model
        if rollout.session == sessions.trained:
            trajectory = await rollout.trajectory()
        else:
            trajectory = await art.rollout(model, sessions.trained).trajectory()
        num_untrained = 0
        if sessions.other_functions or rollout.session == sessions.other:
            num_untrained = num_answers(await art.rollout(model, sessions.other).trajectory())
            trajectory.metrics["untrained_answers"] = num_untrained
        if num_answers(trajectory) or not is_trained:
            return trajectory
        if num_untrained:
            names = ", ".join(sorted(sessions.other_functions or {WORKFLOW}))
            raise RolloutFailed(
                f"all {num_untrained} answers came from {names}, which finetuning.target_functions leaves out: add it there"
            )
        raise RolloutFailed(
            f"no answer of {model.get_inference_name()} can be trained: the workflow's requests went elsewhere. It has to ask "
            f"OPENAI_BASE_URL={model.inference_base_url} for OPENAI_MODEL={model.get_inference_name()}"
        )


def num_answers(trajectory: art.Trajectory) -> int:
    """The sampled answers of all conversations."""
    entries = list(trajectory.messages_and_choices)
    for history in trajectory.additional_histories:
        entries += history.messages_and_choices
    return sum(not isinstance(entry, dict) for entry in entries)


def step_of(model: art.TrainableModel) -> str | None:
    """The step that `art.evaluate` pins a copy of the model to, or "base"; None: the newest step."""
    name = model.get_inference_name()
    return "base" if name == model.base_model else name.partition("@")[2] or None


def seed_of(*parts: object) -> int:
    """A number below 2^31 from the run's seed and the rollout's place."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def reason_of(error: BaseException) -> str:
    """A failure in one line."""
    lines = str(error).strip().splitlines() or [""]
    name = "" if isinstance(error, RolloutFailed) else f"{type(error).__name__}: "
    return f"{name}{lines[0]}"[:REASON_CHARACTERS]
