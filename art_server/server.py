"""The composition root: makes the parts of a server, starts and stops them. Each route takes the parts that it uses."""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from art_server.engine.command import remove_run_dirs
from art_server.engine.device.assignment import (
    check_devices,
    device_environment,
    engine_devices,
    rank_devices,
)
from art_server.engine.device.computing import ComputingDevices
from art_server.engine.device.detection import detect, machine_without_gpus
from art_server.engine.device.owner import AllDevices, DeviceOwner
from art_server.engine.engine import Engine
from art_server.engine.fleet import Fleet
from art_server.engine.pause_gate import PauseGate
from art_server.errors import InvalidInput, StorageFull, Unavailable
from art_server.inference_proxy import Proxy
from art_server.jobs.job_row import PENDING, JobRow
from art_server.jobs.layer_check import LayerCheck
from art_server.jobs.queue import JobQueue
from art_server.jobs.reports import Reports
from art_server.jobs.runner import JobRunner
from art_server.jobs.train_requests import TrainRequests
from art_server.jobs.trainer import ServerTrainer
from art_server.learning.answerer import Answerer
from art_server.learning.collector import Collector
from art_server.learning.deletion import Deletion
from art_server.learning.feedback import FeedbackIntake
from art_server.learning.guard import Guard
from art_server.learning.policies import Policies
from art_server.learning.releases import Releases
from art_server.learning.releasing import Releasing
from art_server.learning.scores import Scores
from art_server.learning.teacher import Teacher
from art_server.ledger.earlier import number_records
from art_server.ledger.intake import Intake
from art_server.ledger.ledger import Ledger, Retention
from art_server.models.base_loader import BaseLoader
from art_server.models.checkpoints import Checkpoints
from art_server.models.registration import Registration
from art_server.models.uploads import Uploads
from art_server.process.background import Background, LoopWatch
from art_server.process.children import Children
from art_server.process.place import Here
from art_server.process.progress import StartProgress
from art_server.settings import ServerConfig
from art_server.shared.clock import REAL, Clock
from art_server.status.status import Status
from art_server.store import files
from art_server.store.registry import RegisteredModel, Registry

if TYPE_CHECKING:
    from art_server.machines.hosts import Hosts

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 60.0
"""Interval at which old records leave the ledger, old jobs the queue, and old rollouts the disk."""


@dataclass(frozen=True, eq=False)
class Server:
    """The parts of a server: a base model, its engine and trainer, and the models that adapt it."""

    config: ServerConfig
    lock_file: int
    """A file descriptor, open while the server has its folder."""
    devices: ComputingDevices
    background: Background
    loop_watch: LoopWatch
    reports: Reports
    gate: PauseGate
    ledger: Ledger
    fleet: Fleet
    trainer: ServerTrainer
    registry: Registry
    queue: JobQueue
    base: BaseLoader
    registration: Registration
    checkpoints: Checkpoints
    uploads: Uploads
    runner: JobRunner
    train_requests: TrainRequests
    proxy: Proxy
    scores: Scores
    policies: Policies
    feedback: FeedbackIntake
    deletion: Deletion
    releasing: Releasing
    collector: Collector
    status: Status
    hosts: "Hosts | None" = None
    """None: no other machine may offer its devices."""

    async def start(self) -> None:
        """Begins to load the base model of the command line, or else the model that served last, and starts the job runner.
        `base.fatal` reports a `--base-model` that cannot be loaded."""
        await self.base.start()
        if self.hosts is not None:
            self.hosts.start()
        self.background.start("job runner", self.runner.run_forever)
        await asyncio.to_thread(self.releasing.restore)
        await asyncio.to_thread(self.policies.restore, self.registry)
        self.background.start("learning", self.collector.run_forever)
        self.background.start("releases", self.releasing.run_forever)
        self.background.start("pruning", self._prune)
        self.background.start("loop watch", self.loop_watch.run)
        self.background.start("activity", self.status.watch)

    async def stop(self) -> None:
        """Ends both processes and all background tasks, and releases the folder."""
        # First, because it would start the trainer again.
        await self.background.stop("job runner")
        await self.background.stop("learning")
        await self.background.stop("releases")
        await self.base.stop()
        if self.hosts is not None:
            await self.hosts.stop()
        await self.trainer.stop()
        await self.fleet.stop()
        await self.background.stop()
        await asyncio.to_thread(self.reports.close)
        self.close()

    @property
    def fatal(self) -> BaseException | None:
        """Why the server must end; None while it may serve."""
        return self.base.fatal or (self.hosts.fatal if self.hosts is not None else None)

    def close(self) -> None:
        """Releases the folder of a server that has started nothing."""
        self.ledger.close()
        self.registry.database.close()
        os.close(self.lock_file)

    async def _prune(self) -> None:
        while True:
            await asyncio.to_thread(self.ledger.prune)
            await asyncio.to_thread(self.queue.prune)
            await asyncio.to_thread(self._prune_rollouts)
            await asyncio.to_thread(self._prune_scores)
            await asyncio.sleep(PRUNE_SECONDS)

    def _prune_rollouts(self) -> None:
        """Deletes the oldest rollouts of models above `--rollouts-max-gb`. An error of the disk is logged."""
        for model in self.registry.all():
            try:
                model.folder.prune_rollouts(int(self.config.rollouts_max_gb * 2**30))
            except OSError as error:
                logger.error("old rollouts of %s could not be deleted: %s", model.id, error)

    def _prune_scores(self) -> None:
        """Scores lose their texts with the ledger's records, and go later. An error of the disk is logged."""
        try:
            for model in self.registry.all():
                policy = self.policies.of(model.number).policy
                self.scores.drop_old(model.number, policy.max_age_days * 86400.0)
            self.scores.prune(self.config.ledger_max_age_days * 86400.0)
        except (StorageFull, Unavailable) as error:
            logger.error("old scores could not be deleted: %s", error)


def check_shares(config: ServerConfig, registry: Registry) -> None:
    """Checks that `--share` names projects that exist or that a key names.

    Raises:
        InvalidInput: `--share` names another project.
    """
    known = {model.record.project for model in registry.all()}
    known |= {project for key in config.api_keys for project in key.projects or ()}
    for project in config.shares:
        if project not in known:
            raise InvalidInput(
                f"--share {project}: there is no such project here, only {', '.join(sorted(known)) or 'an empty folder'}; "
                "register a model in it first, or name it in the line of a key",
                code="unknown_project",
                param="share",
            )


def build(
    config: ServerConfig,
    make_fleet: Callable[..., Fleet] = Fleet,
    make_trainer: Callable[..., ServerTrainer] = ServerTrainer,
    *,
    clock: Clock = REAL,
) -> Server:
    """A server that has started nothing. Takes the server's folder, and kills the processes that an earlier server left there.

    Raises:
        Conflict: another server has the folder.
        InvalidInput: `--share` names an unknown project, or a configured device does not exist.
        UsageError: Ray is not installed or does not answer.
    """
    asked = config
    if config.cluster is not None:  # Ray places engines and ranks on machines that join
        config = config.model_copy(update={"engines": 0, "ranks": 0})
    lock_file = files.lock_folder(config.server_dir, config.path)
    computes = config.engines > 0 or config.ranks != 0
    machine = detect() if computes else machine_without_gpus()
    check_devices(config, machine)
    devices = ComputingDevices(config, machine.kind)
    children = Children(config.server_dir, config.log_dir)
    if left := children.reap():
        logger.warning("killed processes that an earlier server left running: %s", left)
    remove_run_dirs(config.server_dir)
    incoming = config.server_dir / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)

    background, loop_watch, gate = Background(clock=clock), LoopWatch(), PauseGate(clock=clock)
    reports = Reports(config.trackers, config.log_dir)
    retention = Retention(config.ledger_max_age_days * 86400.0, int(config.ledger_max_gb * 2**30))

    # `Registry` calls this after the start only, when ledger and queue exist.
    def forget_steps(model: int, after: int) -> None:
        ledger.forget_steps(model, after)
        queue.forget_keys(model, after)

    registry = Registry(config.path, forget_steps)
    ledger_file = config.server_dir / "ledger.sqlite"
    number_records(ledger_file, registry.table.number_of)
    ledger = Ledger(ledger_file, retention, config.splicing, clock=clock)
    intake = Intake(ledger, background)

    def is_busy() -> bool:
        return gate.num_inside > 0

    def here(numbers: Sequence[int]) -> Here:
        return Here(device=machine.kind, children=children, variables=device_environment(numbers, machine))

    owners = [DeviceOwner() for _ in range(config.engines)]
    owner = owners[0] if len(owners) == 1 else AllDevices(owners)
    progress = StartProgress()
    changed = asyncio.Condition()
    replicas = [
        Engine(
            location=here(numbers),
            config=config.model_copy(update={"serve_devices": numbers}),
            owner=engine_owner,
            receiver=intake.receiver(),
            is_busy=is_busy,
            background=background,
            name="engine" if config.engines == 1 else f"engine-{index}",
            progress=progress,
            changed=changed,
            mismatch_limits_of=devices.mismatch_limits,
            clock=clock,
        )
        for index, (numbers, engine_owner) in enumerate(zip(engine_devices(config, machine), owners, strict=True))
    ]
    fleet = make_fleet(
        replicas=replicas,
        progress=progress,
        changed=changed,
        config=config,
        mismatch_limits_of=devices.mismatch_limits,
        clock=clock,
    )
    locations = [here(numbers) for numbers in rank_devices(config, machine)]
    trainer = make_trainer(config=config, device=machine.kind, locations=locations, clock=clock)
    hosts: Hosts | None = None
    if config.takes_hosts:
        from art_server.machines import hosts as machines  # only a server that takes hosts loads their code

        hosts = machines.Hosts(
            config=asked,
            fleet=fleet,
            trainer=trainer,
            devices=devices,
            intake=intake,
            changed=changed,
            is_busy=is_busy,
            background=background,
            children=children,
            clock=clock,
        )
    scores, policies = Scores(registry.database, clock=clock), Policies(registry.database, clock=clock)
    releases = Releases(registry.database, clock=clock)

    # In the transaction of the rollback.
    def on_roll_back(model: int, step: int) -> None:
        scores.roll_back(model, step)
        releases.roll_back(model, step)

    def on_change(job: JobRow, model: RegisteredModel | None) -> None:
        reports.take(job, model)
        if job.state not in PENDING:
            collector.wake()

    queue = JobQueue(registry.database, config.max_queued_jobs, config.shares, on_end=scores.end_job, clock=clock)
    check_shares(config, registry)
    base = BaseLoader(
        config=config,
        machine=machine,
        devices=devices,
        owner=owner,
        fleet=fleet,
        trainer=trainer,
        ledger=ledger,
        queue=queue,
        children=children,
        clock=clock,
    )
    registration = Registration(registry=registry, base=base, fleet=fleet, max_lora_rank=config.max_lora_rank)
    checkpoints = Checkpoints(
        registry=registry,
        queue=queue,
        gate=gate,
        fleet=fleet,
        ledger=ledger,
        incoming=incoming,
        keep_last=config.keep_last,
        on_roll_back=on_roll_back,
        clock=clock,
    )
    uploads = Uploads(
        registry=registry,
        fleet=fleet,
        checkpoints=checkpoints,
        incoming=incoming,
        max_lora_rank=config.max_lora_rank,
        load_base=base.load,
    )
    runner = JobRunner(
        queue=queue,
        registry=registry,
        fleet=fleet,
        gate=gate,
        trainer=trainer,
        owner=owner if config.takes_turns else None,
        retain=checkpoints.retain,
        layers=LayerCheck(config.server_dir / "layers", devices),
        report=on_change,
        more_trainers=trainer.more,
        clock=clock,
    )
    train_requests = TrainRequests(
        ledger=ledger, fleet=fleet, runner=runner, queue=queue, name_of=registry.table.name_of
    )
    feedback = FeedbackIntake(
        scores=scores, policies=policies, ledger=ledger, secret=files.read_secret(config.server_dir / "users_secret")
    )
    answerer = Answerer(fleet=fleet, gate=gate)
    releasing = Releasing(
        releases=releases,
        scores=scores,
        policies=policies,
        registry=registry,
        checkpoints=checkpoints,
        guard=Guard(ledger=ledger, answerer=answerer),
        clock=clock,
    )
    collector = Collector(
        scores=scores,
        policies=policies,
        registry=registry,
        registration=registration,
        requests=train_requests,
        runner=runner,
        releasing=releasing,
        teacher=Teacher(fleet=fleet, answerer=answerer),
        clock=clock,
    )
    releasing.on_decision = collector.wake
    proxy = Proxy(
        registry=registry,
        ledger=ledger,
        fleet=fleet,
        gate=gate,
        base=base,
        wait_limit_seconds=config.wait_limit_seconds,
        tracing=reports.tracing,
    )
    status = Status(
        path=config.path,
        fleet=fleet,
        trainer=trainer,
        gate=gate,
        base=base,
        runner=runner,
        loop_watch=loop_watch,
        background=background,
    )
    return Server(
        config=config,
        lock_file=lock_file,
        devices=devices,
        background=background,
        loop_watch=loop_watch,
        reports=reports,
        gate=gate,
        ledger=ledger,
        fleet=fleet,
        trainer=trainer,
        registry=registry,
        queue=queue,
        base=base,
        registration=registration,
        checkpoints=checkpoints,
        uploads=uploads,
        runner=runner,
        train_requests=train_requests,
        proxy=proxy,
        scores=scores,
        policies=policies,
        feedback=feedback,
        deletion=Deletion(scores=scores, ledger=ledger, feedback=feedback),
        releasing=releasing,
        collector=collector,
        status=status,
        hosts=hosts,
    )
