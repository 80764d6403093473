"""The server without HTTP: builds its parts, and has one method for each operation that a client can request."""

import asyncio
import logging
import shutil
from collections.abc import Mapping

from art_protocol.wire import LogReply, LogRequest, SessionReply, TrainConfig
from art_server.base_loader import BaseLoader
from art_server.checkpoints.manage import Checkpoints
from art_server.checkpoints.uploads import Uploads
from art_server.jobs.layer_check import LayerCheck
from art_server.jobs.metrics import write_log
from art_server.jobs.queue import JobQueue
from art_server.jobs.rollouts import Rollouts
from art_server.jobs.runner import JobRunner
from art_server.jobs.train_requests import NewJob, TrainRequests
from art_server.ledger.sessions import session_trajectory
from art_server.processes import Processes
from art_server.registration import Registration
from art_server.relay import Relay
from art_server.settings import Device, ServerConfig
from art_server.state import State
from art_server.store.registry import Model, Registry

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 60.0
"""Between two removals of old records from the ledger, old jobs from the queue, and old rollouts."""


class Service:
    """One server: a base model, its engine and trainer, and the models that adapt it."""

    def __init__(self, config: ServerConfig):
        self._config = config
        self._processes = processes = Processes(config)
        engine, trainer, gate = processes.engine, processes.trainer, processes.gate
        self.device: Device = processes.machine.kind
        self._registry = registry = Registry(config.path)
        self._queue = JobQueue(config.server_dir / "jobs.sqlite", config.max_queued_jobs)
        self._base = BaseLoader(config, processes, self._queue)
        making = asyncio.Lock()
        self._registration = Registration(
            registry, self._base, engine, trainer, making, config.max_lora_rank
        )
        incoming = config.server_dir / "incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        self._checkpoints = checkpoints = Checkpoints(
            registry,
            self._queue,
            gate,
            engine,
            processes.ledger,
            making,
            incoming,
            config.keep_last,
        )
        rank, load = config.max_lora_rank, self._base.load
        self._uploads = Uploads(registry, engine, trainer, checkpoints, incoming, rank, load)
        self._runner = JobRunner(
            self._queue,
            registry,
            engine,
            gate,
            trainer,
            processes.owner if config.takes_turns else None,
            self._checkpoints.retain,
            LayerCheck(config.server_dir / "layers"),
            processes.reports.take,
        )
        self._train_requests = TrainRequests(processes.ledger, engine, self._runner)
        self._relay = Relay(
            registry,
            processes.ledger,
            engine,
            gate,
            self._base,
            config.wait_limit_seconds,
            processes.reports.tracing,
        )
        self._state = State(config, processes, self._base, self._runner)
        self._delegate()

    def _delegate(self) -> None:
        """Sets the operations that one part implements alone."""
        relay, runner, checkpoints, uploads = (
            self._relay,
            self._runner,
            self._checkpoints,
            self._uploads,
        )
        self.resolve, self.relay = relay.resolve, relay.answer
        self.was_engine_killed, self.engine_metrics = relay.was_engine_killed, relay.engine_metrics
        self.check_engine = relay.check_engine
        self.tracing, self.figures = self._processes.reports.tracing, self._processes.figures
        self.models, self.model = self._registry.all, self._registry.get
        self.history = self._registry.history
        self.register, self.info = self._registration.register, self._registration.info
        self.check_trainable = self._registration.check_trainable
        self.job, self.jobs, self.job_info = runner.get, runner.jobs, runner.info
        self.has_key, self.find_job = runner.has_key, runner.find
        self.pending_jobs = self._queue.pending
        self.follow, self.move_job, self.cancel_job = runner.follow, runner.move, runner.cancel
        self.checkpoints, self.delete_checkpoints = checkpoints.overview, checkpoints.delete
        self.fork, self.roll_back = checkpoints.fork, checkpoints.roll_back
        self.delete_model = checkpoints.delete_model
        self.upload_part, self.receive_upload = uploads.part, uploads.receive
        self.take_in_upload = uploads.take_in
        self.health, self.memory = self._state.health, self._state.memory
        self.activity = self._state.activity

    # --- start and stop ---

    async def start(self) -> None:
        """Begins to load the base model of the command line, or else the one that served last, and starts the job runner.
        `fatal` reports a `--base-model` that cannot be loaded."""
        for model in self._registry.with_broken_steps:  # their numbers will be used again
            names = model.record.project, model.record.name
            await asyncio.to_thread(self._processes.ledger.forget_steps, *names, model.step)
        await self._base.start()
        background = self._processes.background
        background.start("job runner", self._runner.run_forever)
        background.start("pruning", self._prune)
        background.start("loop watch", self._processes.loop_watch.run)
        background.start("activity", self._state.watch)

    @property
    def fatal(self) -> BaseException | None:
        """The error that stops the server: the command line's base model cannot be loaded. None without one."""
        return self._base.fatal

    async def stop(self) -> None:
        await self._processes.background.stop("job runner")
        await self._base.stop()
        await self._processes.stop()
        self._queue.close()
        self._registry.history.close()

    async def _prune(self) -> None:
        while True:
            await asyncio.to_thread(self._processes.ledger.prune)
            await asyncio.to_thread(self._queue.prune)
            await asyncio.to_thread(self._prune_rollouts)
            await asyncio.sleep(PRUNE_SECONDS)

    def _prune_rollouts(self) -> None:
        """Deletes the oldest rollouts of models above `--rollouts-max-gb`. An error of the disk is logged."""
        for model in self._registry.all():
            try:
                model.folder.prune_rollouts(int(self._config.rollouts_max_gb * 2**30))
            except OSError as error:
                logger.error("old rollouts of %s could not be deleted: %s", model.id, error)

    async def wait_ready(self) -> None:
        """Returns when the engine serves.

        Raises:
            Unavailable: the engine failed, or does not serve within `--wait-limit`.
        """
        await self._processes.engine.wait_ready(self._config.wait_limit_seconds)

    async def wait_base(self) -> None:
        """Returns when the base model of the server's start is found, or cannot be loaded.

        Raises:
            Unavailable: that takes longer than `--wait-limit`.
        """
        await self._base.wait_found(self._config.wait_limit_seconds)

    # --- models ---

    def ignored_args(self, requested: Mapping[str, str]) -> list[str]:
        """One sentence for each requested engine argument that is not in effect."""
        return self._processes.engine.ignored_args(requested)

    @property
    def base_name(self) -> str | None:
        """The name of the loaded base model."""
        return self._state.base_name

    @property
    def max_seq_length(self) -> int | None:
        """Tokens of prompt plus completion, None before a base model is loaded."""
        return self._processes.engine.max_seq_length

    def served_models(self, projects: frozenset[str] | None, only: str | None) -> list[Model]:
        """The models on the loaded base model that a caller may use."""
        return [
            model for model in self.models(projects, only) if self._registration.is_on_base(model)
        ]

    # --- training ---

    def begin_job(self, model: Model, config: TrainConfig) -> NewJob:
        """A train request whose groups come one by one.

        Raises:
            Conflict: the model's base model is not loaded.
        """
        return self._train_requests.begin(model, config, self._registration.limits(model))

    async def log(self, model: Model, request: LogRequest, rollouts: Rollouts) -> LogReply:
        """Writes the rollouts and metrics of a step to disk, and reports them.

        Raises:
            InvalidInput: the step does not exist yet.
        """
        reply = await write_log(model, request, rollouts)
        has_groups = bool(rollouts.outlines)
        self._processes.reports.logged(model, request.split, reply, has_groups=has_groups)
        return reply

    def session(self, model: Model, session: str) -> SessionReply:
        """The conversations of a model in a session of its project (blocking: reads the ledger)."""
        found = self._processes.ledger.find_session(
            model.record.project, model.record.name, session
        )
        return session_trajectory(found)
