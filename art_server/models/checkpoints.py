"""Lists, prunes, forks, rolls back and deletes the checkpoints of registered models.

A step is removed in this order: it is marked, so that no request resolves to it; the engine stops serving its adapter;
its folder is deleted or set aside. No step is removed while requests use it. Nothing here waits for the trainer or the
device: a running step may take hours.
"""

import asyncio
import contextlib
import logging
import shutil
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from art_protocol.wire import (
    About,
    CheckpointInfo,
    CheckpointList,
    DeleteCheckpointsReply,
    DeleteCheckpointsRequest,
    ForkRequest,
)
from art_server.engine.fleet import Fleet
from art_server.engine.pause_gate import PauseGate
from art_server.errors import Conflict, InvalidInput, NotFound
from art_server.jobs.queue import JobQueue
from art_server.ledger.ledger import Ledger
from art_server.shared.clock import REAL, Clock
from art_server.store import files
from art_server.store.archive import check_content, describe_step
from art_server.store.model_folder import OPTIMIZER_FILE, ModelFolder, copy_content, create_model
from art_server.store.registry import RegisteredModel, Registry

logger = logging.getLogger(__name__)

IN_USE_SECONDS, POLL_SECONDS = 60.0, 0.05
"""How long a rollback waits for requests that still sample from a later step, and how often it checks."""

T = TypeVar("T")


class Checkpoints:
    """Changes steps and models on disk, and keeps engine and registry consistent with the disk."""

    def __init__(
        self,
        *,
        registry: Registry,
        queue: JobQueue,
        gate: PauseGate,
        fleet: Fleet,
        ledger: Ledger,
        incoming: Path,
        keep_last: int,
        on_roll_back: Callable[[int, int], None] = lambda model, step: None,
        clock: Clock = REAL,
    ):
        """`incoming` is the folder for unfinished checkpoints; empty at start. `on_roll_back(MODEL, STEP)` is called in the transaction
        of a rollback, with the model's number."""
        self._on_roll_back = on_roll_back
        self._registry = registry
        self._queue = queue
        self._gate = gate
        self._fleet = fleet
        self._ledger = ledger
        self._incoming = incoming
        self._keep_last = keep_last
        self._clock = clock
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By model id. Each lock permits one change of the model's steps at a time."""

    async def overview(self, model: RegisteredModel) -> CheckpointList:
        """The kept steps, oldest first, with their metrics."""
        return await asyncio.to_thread(list_checkpoints, model)

    # --- pruning ---

    async def delete(self, model: RegisteredModel, request: DeleteCheckpointsRequest) -> DeleteCheckpointsReply:
        """Deletes all steps except the newest, the serving step, steps in use, and the named steps or the best step.

        Raises:
            InvalidInput: the history does not have the metric; nothing was deleted.
        """
        async with self._locks[model.id]:
            keep = await asyncio.to_thread(steps_to_keep, model, request)
            deleted = await self._delete_steps(model, keep)
        return DeleteCheckpointsReply(kept=model.folder.steps(), deleted=deleted)

    async def retain(self, model: RegisteredModel) -> None:
        """Deletes old steps after a train step. Keeps the newest `--keep-last`, the serving step, the best step, and steps in
        use. An error of the disk is logged; the next step tries again."""
        if not self._keep_last:
            return
        async with self._locks[model.id]:
            try:
                keep = set(model.folder.steps()[-self._keep_last :])
                if len(keep) == len(model.folder.steps()):
                    return
                best = await asyncio.to_thread(model.history.best_step)
                await self._delete_steps(model, keep | ({best} if best is not None else set()))
            except OSError as error:
                logger.error("old steps of %s could not be deleted: %s", model.id, error)

    async def _delete_steps(self, model: RegisteredModel, keep: set[int]) -> list[int]:
        steps = model.folder.steps()
        keep = keep | {model.step, *steps[-1:]}
        # Nothing is awaited between the check of the pause gate and the mark, so no request can start in between.
        leaving = [step for step in steps if step not in keep and not self._gate.uses(model.adapter_name(step))]
        with marked_for_deletion(model, leaving):
            self._unload(model, leaving)
            await asyncio.to_thread(model.folder.remove_steps, leaving)
        if leaving:
            logger.info("%s: deleted steps %s", model.id, leaving)
        return leaving

    def _unload(self, model: RegisteredModel, steps: Iterable[int]) -> None:
        names = {model.adapter_name(step) for step in steps}
        for name in names & set(self._fleet.loaded_adapters()):
            self._fleet.unload_adapter(name)

    # --- changing what a model is ---

    @contextlib.asynccontextmanager
    async def changed(self, model_id: str) -> AsyncIterator[None]:
        """Inside the block nobody else creates or deletes a model, or changes the steps of this model."""
        async with self._registry.models_lock, self._locks[model_id]:
            yield

    async def fork(self, source: RegisteredModel, request: ForkRequest) -> RegisteredModel:
        """Creates a model from a step of another model: the step's adapter and, if it is kept, the optimizer state. The
        step keeps its number; the new model's history is empty.

        Raises:
            NotFound: the source has no such step.
            Conflict: the new model exists already.
            InvalidInput: the step's files are damaged.
        """
        async with self.changed(source.id):
            if self._registry.find(request.project, request.name) is not None:
                raise model_exists(f"{request.project}/{request.name}")
            step = source.step if request.step is None else request.step
            folder = self._registry.folder(request.project, request.name)
            model = await asyncio.to_thread(self._fork, source, step, folder)
        logger.info("%s was forked from %s", model.id, source.adapter_name(step))
        return model

    def _fork(self, source: RegisteredModel, step: int, folder: ModelFolder) -> RegisteredModel:
        content = self._incoming / uuid.uuid4().hex
        try:
            description = describe_step(source.folder, source.record, step)
            copy_content(source.folder.checkpoint_dir(step), content)
            check_content(content, description)
            names = {"project": folder.project, "name": folder.name, "created_at": self._clock.now()}
            record = source.record.model_copy(update=names)
            create_model(folder, record, self._fleet.log_path, content, description.record())
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(files.remove_folder, folder.path)  # a repeated request may create it
                model = self._registry.add(folder, record)
                on_failure.pop_all()
            return model
        finally:
            shutil.rmtree(content, ignore_errors=True)

    async def roll_back(self, model: RegisteredModel, step: int) -> None:
        """Makes an earlier step the newest. The step serves at once, unless a release holds it. The later steps and their history rows are set aside
        when all requests that sample from these steps have ended.

        Raises:
            NotFound: the model has no such step.
            Conflict: jobs wait or run, or requests did not end in time; the model is unchanged.
        """
        async with self._locks[model.id]:
            model.folder.read_checkpoint(step)
            await self._while_idle(model, lambda: None)
            later = [kept_step for kept_step in model.folder.steps() if kept_step > step]
            before = model.step
            serving = model.step = min(before, step) if model.holds_steps else step
            with marked_for_deletion(model, later):
                try:
                    await self._wait_unused(model, later)
                    self._unload(model, later)
                    self._fleet.forget_prompts()
                    # Before the commit: a server that dies in between has only forgotten who sampled what. Before the queue is
                    # held: the ledger reads all of its records.
                    await asyncio.to_thread(self._ledger.forget_steps, model.number, step)
                    await self._while_idle(model, lambda: self._set_aside(model, step, later))
                finally:
                    if model.step == serving:  # a job in between may have made a newer step
                        model.step = min(before, model.steps()[-1])
        logger.info("%s was rolled back; set aside: steps %s", model.adapter_name(step), later)

    async def _wait_unused(self, model: RegisteredModel, steps: list[int]) -> None:
        try:
            async with self._clock.timeout(IN_USE_SECONDS):
                while any(self._gate.uses(model.adapter_name(step)) for step in steps):
                    await self._clock.sleep(POLL_SECONDS)
        except TimeoutError as error:
            raise Conflict(
                f"requests still sample from later steps of '{model.id}' after {IN_USE_SECONDS:.0f} s: repeat the request "
                "when they have ended",
                code="in_use",
                param="step",
            ) from error

    async def delete_model(self, model: RegisteredModel) -> None:
        """Deletes a model with its history and trajectories.

        Raises:
            NotFound: another request has deleted the model.
            Conflict: jobs wait or run, or requests sample from the model; the model is unchanged.
        """
        async with self.changed(model.id):
            trash = await self._leave(model, self._move_to_trash)
            # A server that is killed here leaves the rest to the next start (`files.clear_graves`).
            await asyncio.to_thread(shutil.rmtree, trash)
        logger.info("%s was deleted", model.id)

    async def rename(self, model: RegisteredModel, name: str) -> RegisteredModel:
        """Gives a model another name in its project, with its steps, history, rollouts, jobs and records.

        Raises:
            NotFound: another request has deleted the model.
            Conflict: the name is taken, jobs wait or run, or requests sample from the model; the model is unchanged.
        """
        async with self.changed(model.id):
            if self._registry.find(model.record.project, name) is not None:
                raise model_exists(f"{model.record.project}/{name}")
            folder = self._registry.folder(model.record.project, name)
            if folder.path.exists():
                raise model_exists(folder.model_id)
            renamed = await self._leave(model, lambda leaving: self._registry.rename(leaving, name))
        logger.info("%s is %s now", model.id, renamed.id)
        return renamed

    async def set_about(self, model: RegisteredModel, about: About) -> About:
        """Replaces the tags and notes of a model."""
        async with self.changed(model.id):
            model = self._registry.get(model.record.project, model.record.name)
            await asyncio.to_thread(model.folder.write_about, about)
        return about

    async def _leave(self, model: RegisteredModel, change: Callable[[RegisteredModel], T]) -> T:
        """Runs `change` while nothing uses the model. After `change` no model has this id."""
        model = self._registry.get(model.record.project, model.record.name)
        await self._while_idle(model, lambda: None)
        steps = model.folder.steps()
        if any(self._gate.uses(model.adapter_name(step)) for step in steps):
            raise Conflict(
                f"requests sample from model '{model.id}': repeat the request when they have ended",
                code="in_use",
                param="name",
            )
        model.is_leaving = True
        try:
            self._unload(model, steps)
            self._fleet.forget_prompts()
            return await self._while_idle(model, lambda: change(model))
        finally:
            model.is_leaving = False

    async def _while_idle(self, model: RegisteredModel, change: Callable[[], T]) -> T:
        """Runs `change` in a thread while the model has no jobs and cannot get any.

        Raises:
            Conflict: jobs of the model wait or run.
        """

        def held() -> T:
            with self._queue.held_idle(model.number):
                return change()

        return await asyncio.to_thread(held)

    def _set_aside(self, model: RegisteredModel, step: int, later: list[int]) -> None:
        if model.folder.newest_step() not in (step, *later):
            raise Conflict(
                f"a job made a newer step of '{model.id}' meanwhile: roll back again if this step is to go, too",
                code="step_moved",
                param="step",
            )
        with self._registry.database.changes("the rollback"):
            self._queue.forget_keys(model.number, after=step)
            self._on_roll_back(model.number, step)
            model.history.roll_back(step)
            self._registry.table.roll_back(model.number, step)
        self._registry.read_release(model)
        self._registry.set_later_aside(model, step)

    def _move_to_trash(self, model: RegisteredModel) -> Path:
        trash = model.folder.move_to_trash()
        self._registry.remove(model)
        return trash


@contextlib.contextmanager
def marked_for_deletion(model: RegisteredModel, steps: Iterable[int]) -> Iterator[None]:
    """Inside the block no request resolves to these steps."""
    model.deleting.update(steps)
    try:
        yield
    finally:
        model.deleting.difference_update(steps)


def model_exists(model_id: str) -> Conflict:
    return Conflict(
        f"model '{model_id}' exists already: choose another name, or delete it first",
        code="model_exists",
        param="name",
    )


def steps_to_keep(model: RegisteredModel, request: DeleteCheckpointsRequest) -> set[int]:
    """The steps that a deletion request keeps, besides the newest and the serving step.

    Raises:
        InvalidInput: there are steps to delete, and the history does not have the metric.
        NotFound: no step to keep exists.
    """
    steps = model.folder.steps()
    if request.keep and not {*request.keep} & {*steps}:
        raise NotFound(
            f"keep names no step of '{model.id}'; kept steps: {', '.join(map(str, steps))}. Nothing was deleted; name one of these",
            code="unknown_step",
            param="keep",
        )
    if request.keep is not None:
        return set(request.keep)
    metric, known = request.best_metric or model.history.ranking()[0], model.history.names()
    if set(steps) <= {model.step, *steps[-1:]}:
        return set()  # no error: programs delete before their first step, when no metric exists
    if metric is None or metric not in known:
        asked = f"'{metric[:200]}'" if metric else "'val/reward', 'train/reward' or 'val/loss'"
        raise InvalidInput(
            f"the history of '{model.id}' has no metric {asked}; it has: {', '.join(known) or 'none'}. "
            "Nothing was deleted; name one of these, or the steps to keep",
            code="unknown_metric",
            param="best_metric",
        )
    best = model.history.best_step(metric)
    return {best} if best is not None else set()


def schedule_notes(model: RegisteredModel) -> list[str]:
    """How the learning rate of a forked model continues, in one sentence; empty for a model without optimizer steps (blocking)."""
    num_steps = model.folder.read_checkpoint(model.step).optimizer_steps
    if not num_steps:
        return []
    note = (
        f"{model.id} begins with {num_steps} optimizer steps: warm-up and schedule of the learning rate count on from there. For a "
        f"schedule that begins with this model set schedule_begins={num_steps}"
    )
    if not (model.folder.checkpoint_dir(model.step) / OPTIMIZER_FILE).exists():
        note += f". The optimizer state of step {model.step} is not kept, so the learning rate rises over the first optimizer steps"
    return [note]


def list_checkpoints(model: RegisteredModel) -> CheckpointList:
    """The kept steps of a model. Blocking: reads the steps' descriptions and the history."""
    folder = model.folder
    best = model.history.best_step()
    steps = [step for step in folder.steps() if model.has(step)]
    values = model.history.values(steps)
    infos: list[CheckpointInfo] = []
    for step in steps:
        with contextlib.suppress(NotFound, FileNotFoundError):  # deleted meanwhile
            record = folder.read_checkpoint(step)
            infos.append(
                CheckpointInfo(
                    step=step,
                    created_at=record.created_at,
                    metrics=values[step],
                    size_bytes=files.folder_size(folder.checkpoint_dir(step)),
                    unchanged=record.unchanged,
                    optimizer_steps=record.optimizer_steps,
                    is_serving=step == model.step,
                    is_best=step == best,
                )
            )
    return CheckpointList(checkpoints=infos, best_metric=model.history.ranking()[0])
