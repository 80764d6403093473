"""One rollout with its reward. The requests of target functions belong to the rollout's session, those of other functions to a
session beside it."""

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import art
from art.finetune.rows import Row
from art.finetune.scoring import Reward
from art.finetune.sections import LLM
from art.finetune.toolkit import innermost_function
from art.finetune.workflows import WORKFLOW, Call, Workflow, addresses

OTHER = ".other"
REASON_CHARACTERS = 300


class RolloutFailed(Exception):
    """A rollout without a reward; the message has the reason and the remedy."""


Kept = Callable[
    [art.TrainableModel, Row, int, str, Callable[[], Awaitable[art.Trajectory]]], Coroutine[Any, Any, art.Trajectory]
]
"""From a model, a row, which of its repetitions, a session and what plays it, to the trajectory."""


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
    is_seeded: bool
    """Whether requests that have no seed of their own get one."""

    async def play(self, model: art.TrainableModel, row: Row, session: str, seed: int) -> tuple[art.Trajectory, Any]:
        """A rollout's trajectory with its reward, and its output. metrics["untrained_answers"] counts answers to other
        functions.

        Raises:
            Exception: the workflow or an evaluator failed, took too long, or asked for no answer that can be trained.
        """
        is_own = WORKFLOW in self.targets
        others: set[str] = set() if is_own else {WORKFLOW}

        def session_of_request() -> str:
            name = innermost_function()
            if name in self.targets:
                return session
            others.add(name)
            return session + OTHER

        step = step_of(model)
        async with art.rollout(model, session if is_own else session + OTHER) as rollout:
            call = Call(row, rollout, seed, addresses(self.llms, self.policy, model))
            limit = asyncio.timeout(self.timeout_seconds)
            try:
                with art.capture(session_of_request, step, seed if self.is_seeded else None):
                    async with limit:
                        output = await self.workflow(call)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise RolloutFailed(
                    f"the rollout took longer than {self.timeout_seconds:g} s: raise eval.general.rollout_timeout_seconds"
                ) from error
        trained = rollout if is_own else art.rollout(model, session)
        trajectory = await trained.trajectory(metadata={"row": row.id})
        if others:
            other = await art.rollout(model, session + OTHER).trajectory()
            trajectory.metrics["untrained_answers"] = num_answers(other)
        if step is None and not num_answers(trajectory):
            num_unnamed = int(trajectory.metrics.get("unnamed_requests", 0))
            is_other = bool(trajectory.metrics.get("untrained_answers"))
            raise RolloutFailed(_why_empty(model, others if is_other else set(), num_unnamed))
        await self.reward.score(row, output, trajectory)
        return trajectory, output

    def player(
        self, session: str, seed: int, kept: Kept | None = None
    ) -> Callable[[art.TrainableModel, Row], Coroutine[Any, Any, art.Trajectory]]:
        """The rollout function of an evaluation. A row's repetitions have different seeds, partners the same. `kept` may know a
        repetition, or plays and keeps it."""
        counts: Counter[tuple[str, str]] = Counter()

        async def play(model: art.TrainableModel, row: Row) -> art.Trajectory:
            case = model.get_inference_name(), row.id
            counts[case] += 1
            number, own = counts[case], f"{session}-{uuid.uuid4().hex[:12]}"

            async def fresh() -> art.Trajectory:
                trajectory, _ = await self.play(model, row, own, seed_of(seed, "val", row.id, number))
                return trajectory

            return await (kept(model, row, number, own, fresh) if kept is not None else fresh())

        return play


def _why_empty(model: art.TrainableModel, others: set[str], num_unnamed: int) -> str:
    name = model.get_inference_name()
    if others:
        left_out = ", ".join(sorted(others))
        return f"all answers came from {left_out}, which finetuning.target_functions leaves out: add it there"
    if num_unnamed:
        return (
            f"no answer of {name} can be trained: {num_unnamed} requests of the last minutes reached the server without their "
            "rollout. Programs and HTTP clients that are not captured need rollout.base_url or rollout.api_key "
            "(docs/finetune.md, Workflows)"
        )
    return (
        f"no answer of {name} can be trained: the workflow's requests went elsewhere. It has to ask "
        f"OPENAI_BASE_URL={model.inference_base_url} for OPENAI_MODEL={name}"
    )


def num_answers(trajectory: art.Trajectory) -> int:
    """The sampled answers of all conversations."""
    histories = [trajectory, *trajectory.additional_histories]
    return sum(not isinstance(entry, dict) for each in histories for entry in each.messages_and_choices)


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
    return _in_one_line(type(error).__name__, str(error))


def reason_of_failure(failure: Any) -> str:
    """The reason of a failure in a group (`type` and `message`)."""
    return _in_one_line(failure.type.rpartition(".")[2], failure.message)


def _in_one_line(kind: str, message: str) -> str:
    lines = message.strip().splitlines() or [""]
    name = "" if kind == RolloutFailed.__name__ else f"{kind}: "
    return f"{name}{lines[0]}"[:REASON_CHARACTERS]
