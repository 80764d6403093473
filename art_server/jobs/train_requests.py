"""Train requests that become jobs: each group's exact tokens are found as it arrives, and stored when all are there.

Memory holds the messages of one group at a time. Nothing of a request that fails or ends early is kept.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

from art_protocol.history import trajectory_metrics
from art_protocol.wire import JobReport, TrainConfig, TrajectoryGroupBody
from art_server.engine.fleet import Fleet
from art_server.errors import InvalidInput
from art_server.jobs.attempt import ENGINE_WAIT_SECONDS
from art_server.jobs.batch_signs import BatchSigns
from art_server.jobs.job_row import JobRow, Payload
from art_server.jobs.queue import JobQueue
from art_server.jobs.received_trajectories import ReceivedTrajectories
from art_server.jobs.resolve import Resolver
from art_server.jobs.runner import JobRunner
from art_server.jobs.token_sources import Limits, TokenSources
from art_server.ledger.conversation import Message
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Record
from art_server.store.registry import RegisteredModel

R = TypeVar("R")

PAST_STEPS = 50
"""A batch is compared with the batches of this number of newest steps."""
THREADS = 2
"""Separate threads, because resolving may wait for the engine's tokenizer, and other work needs threads, too."""


class TrainRequests:
    """What all train requests share: the parts of the server that they use, and two threads. `NewJob` is a single request."""

    def __init__(
        self, *, ledger: Ledger, fleet: Fleet, runner: JobRunner, queue: JobQueue, name_of: Callable[[int], str]
    ):
        """`name_of` is `ModelTable.name_of`."""
        self._ledger = ledger
        self._name_of = name_of
        self._fleet = fleet
        self._runner = runner
        self._queue = queue
        self._threads = ThreadPoolExecutor(THREADS, "resolve")

    def begin(
        self,
        model: RegisteredModel,
        config: TrainConfig,
        limits: Limits,
        pinned: Mapping[str, Record] = MappingProxyType({}),
    ) -> "NewJob":
        """A request whose groups come one by one. `pinned` are records that the ledger may have deleted, by choice id."""
        rendering = EngineTokenizer(self._fleet, asyncio.get_running_loop())
        sources = TokenSources(
            model=model.number,
            name_of=self._name_of,
            find_record=lambda choice: pinned.get(choice) or self._ledger.find(choice),
            find_by_logprobs=functools.partial(self._ledger.find_by_logprobs, model.number),
            find_by_conversation=functools.partial(self._ledger.find_by_conversation, model.number),
            render=rendering.render,
            tokenize=rendering.tokenize,
            decode=self._ledger.decode,
            end_id=self._ledger.end_id,
            end_ids=self._ledger.end_ids,
            stop_ids=self._ledger.stop_ids,
            find_unnamed=functools.partial(self._ledger.find_unnamed, model.number),
        )
        resolver = Resolver(config, model.id, sources, limits, functools.partial(self._past_signs, model))
        return NewJob(model, config, resolver=resolver, runner=self._runner, threads=self._threads)

    def _past_signs(self, model: RegisteredModel) -> list[BatchSigns]:
        """The signs of the batches that the model's newest steps were trained from (blocking)."""
        return self._queue.signs(model.history.newest_jobs(PAST_STEPS))


class NewJob:
    """A single train request, whose groups arrive one by one."""

    def __init__(
        self,
        model: RegisteredModel,
        config: TrainConfig,
        *,
        resolver: Resolver,
        runner: JobRunner,
        threads: ThreadPoolExecutor,
    ):
        self._model = model
        self._config = config
        self._resolver = resolver
        self._runner = runner
        self._threads = threads
        self._rollouts = ReceivedTrajectories()

    async def resolve_turns(self, group: TrajectoryGroupBody) -> None:
        """Finds the exact tokens of the next group, and drops its messages.

        Raises:
            InvalidInput: the number of turn rewards or advantages is wrong.
        """
        await self._in_thread(self._resolve_turns, group)

    def _resolve_turns(self, group: TrajectoryGroupBody) -> None:
        traces = self._resolver.trace_turns(group)
        turns = [[trace.as_json() for trace in of_trajectory] for of_trajectory in traces]
        self._rollouts.add(group, turns)

    async def store_job(
        self,
        key: str | None,
        body_digest: str,
        expected_step: int | None = None,
        notes: Sequence[str] = (),
        on_insert: Callable[[str], None] = lambda job_id: None,
    ) -> JobRow:
        """The job, which is on disk with its exact tokens when this returns. `notes` are added to its report. `on_insert` is as in
        `JobQueue.insert`.

        Raises:
            InvalidInput: nothing can be trained, or rewards, advantages or learning rates are invalid.
            RecordsMissing: choices were sent by reference, and their records are missing.
            Conflict, TooMany: from `JobRunner.add_job`.
        """
        payload, report = await self._in_thread(self._finish)
        report = report.model_copy(update={"notes": [*report.notes, *notes]})
        metrics = trajectory_metrics(self._rollouts.outlines, "train")
        if self._config.objective == "likelihood" and not metrics.get("train/reward"):
            metrics.pop("train/reward", None)  # demonstrations have no rewards
        return await self._runner.add_job(
            self._model, key, body_digest, self._config, payload, report, metrics, expected_step, on_insert
        )

    def _finish(self) -> tuple[Payload, JobReport]:
        try:
            self._config.check_rates(len(self._rollouts.outlines))
        except ValueError as error:
            param = (
                "config.learning_rate" if self._config.held_out < len(self._rollouts.outlines) else "config.held_out"
            )
            raise InvalidInput(str(error), code="invalid_body", param=param) from error
        resolved = self._resolver.finish()
        self._rollouts.keep_first(len(self._rollouts.outlines) - self._config.held_out)
        return Payload.make(resolved.batch, self._rollouts.content, resolved.signs), resolved.report

    async def _in_thread(self, call: Callable[..., R], *arguments: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)


class EngineTokenizer:
    """The engine's chat template and tokenizer, for threads: each call waits for the event loop."""

    def __init__(self, fleet: Fleet, loop: asyncio.AbstractEventLoop):
        self._fleet = fleet
        self._loop = loop

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None, has_header: bool) -> list[int]:
        """A conversation's tokens, with or without the header of the next answer."""
        body: dict[str, Any] = {"messages": messages, "add_generation_prompt": has_header}
        return self._ask(body | ({"tools": tools} if tools else {}))

    def tokenize(self, text: str) -> list[int]:
        return self._ask({"prompt": text, "add_special_tokens": False})

    def _ask(self, body: dict[str, Any]) -> list[int]:
        future = asyncio.run_coroutine_threadsafe(self._fleet.tokenize(body), self._loop)
        return future.result(ENGINE_WAIT_SECONDS)
