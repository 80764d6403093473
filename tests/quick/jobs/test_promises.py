"""The promises about jobs, whatever happens in whatever order: a machine accepts jobs, ends their training well or
badly, kills and restarts the server at named points, cancels, moves, renames, rolls back and deletes, and compares each job,
step and weight on disk with what its own few lines imply.

Queue, runner, registry, folders and `Checkpoints` are real. The trainer waits in every step for the machine's word, and
time passes when the machine says so: nothing depends on speed. A step's weights are the numbers of the jobs that it was
trained on, in their order.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from art_protocol.history import pack_rows
from art_protocol.wire import ErrorDetail, JobReport, TrainConfig
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.pause_gate import PauseGate
from art_server.errors import Conflict, Unavailable
from art_server.jobs.job_row import JobRow, Payload
from art_server.jobs.queue import JobQueue
from art_server.jobs.runner import JobRunner
from art_server.jobs.trainer_process import TrainerDied, TrainerError
from art_server.models.checkpoints import Checkpoints
from art_server.shared.trainer_messages import Batch, Done, Progress, Task, TrainTask
from art_server.store.history import MetricHistory
from art_server.store.model_folder import ModelFolder
from art_server.store.registry import RegisteredModel, Registry
from tests.fakes.clock import FakeClock
from tests.fakes.parts import FakeEngine, keep_all
from tests.makers.new_models import add_model
from tests.waiting import PATIENCE_SECONDS

SECONDS = PATIENCE_SECONDS
"""Until a server that neither trains nor rests counts as hung."""
MODELS = ("a", "b")
NAMES = (*MODELS, "c")
"""What a model can be renamed to."""
MAX_DEATHS = 5
"""After one more the job fails."""
LATER = 1000.0
"""Longer than every pause before a retry."""
WEIGHTS = "adapter_model.safetensors"

BEFORE_TRAINING = {
    "job begins": (JobQueue, "set_running", False),
    "job is running": (JobQueue, "set_running", True),
}
BEFORE_THE_STEP = {"step begins": (ModelFolder, "commit_checkpoint", False)}
AFTER_THE_STEP = {
    "step is there": (ModelFolder, "commit_checkpoint", True),
    "trajectories written": (ModelFolder, "write_lines", True),
    "history begins": (MetricHistory, "add", False),
    "history written": (MetricHistory, "add", True),
    "job ends": (JobQueue, "set_done", False),
    "job is done": (JobQueue, "set_done", True),
}
KEYS = st.sampled_from([None, "k", "l"])
POINTS = BEFORE_TRAINING | BEFORE_THE_STEP | AFTER_THE_STEP
"""Where a server is killed: a method, and whether before or after it."""

ERRORS: dict[str, Exception] = {
    "no disk space": TrainerError("no_disk_space", "os error 28", retryable=True),
    "no engine": Unavailable("the engine could not be started", code="engine_failed"),
    "read-only": OSError(30, "Read-only file system"),
    "died": TrainerDied("killed"),
    "unforeseen": KeyError("what"),
    "own fault": TrainerError("non_finite", "the loss is NaN"),
}
"""How a training can end."""


class Killed(BaseException):
    """The server is dead: nothing catches this."""


class Trainer:
    """A trainer that waits for the machine in each step."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Of the job in training."""
        self._word: asyncio.Future[None]

    async def run(
        self,
        task: Task,
        on_progress: Callable[[Progress], Any] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        assert isinstance(task, TrainTask) and batch is not None and self.number is None
        self._word = asyncio.get_running_loop().create_future()
        self.number = Batch.model_validate_json(batch).num_groups
        number = self.number
        await self._word
        out = Path(task.out_dir)
        (out / "adapter_config.json").write_text("{}")
        (out / "optimizer.safetensors").write_bytes(b"moments")
        before = (Path(task.in_dir) / WEIGHTS).read_text()
        (out / WEIGHTS).write_text(f"{before}{number} ")
        return Done(metrics={}, optimizer_steps=(task.optimizer_steps or 0) + 1)

    def say(self, error: Exception | None = None) -> None:
        """Ends the training, well or with an error."""
        self.number = None
        if error is None:
            self._word.set_result(None)
        else:
            self._word.set_exception(error)

    def cancel(self) -> None:
        if self.number is not None:
            self.say(TrainerError("cancelled", "the job was cancelled", retryable=True))


class NoLedger:
    def forget_steps(self, model: int, after: int) -> None: ...


class Server:
    """The parts of a server that jobs need, on a folder that may be a dead server's."""

    def __init__(self, folder: Path, clock: FakeClock):
        self.folder, self.engine, self.trainer = folder, FakeEngine(), Trainer()
        gate = PauseGate()
        self.registry = Registry(folder)
        self.queue = JobQueue(self.registry.database, clock=clock)
        self.checkpoints = Checkpoints(
            registry=self.registry,
            queue=self.queue,
            gate=gate,
            fleet=self.engine,  # type: ignore[arg-type]
            ledger=NoLedger(),  # type: ignore[arg-type]
            incoming=folder / "incoming",
            keep_last=0,
        )
        self.runner = JobRunner(
            queue=self.queue,
            registry=self.registry,
            fleet=self.engine,  # type: ignore[arg-type]
            gate=gate,
            trainer=self.trainer,  # type: ignore[arg-type]
            owner=DeviceOwner(),
            retain=keep_all,
            clock=clock,
        )
        self._num_actions, self._rested_after = 0, 0
        self._choose, self.runner._choose = self.runner._choose, self._note_rest
        self.task = asyncio.create_task(self.runner.run_forever())

    async def _note_rest(self) -> JobRow | None:
        num_actions = self._num_actions
        job = await self._choose()
        if job is None:
            self._rested_after = num_actions
        return job

    async def settle(self) -> None:
        """Returns when the server trains, has found no job to run since this call, or is dead."""
        self._num_actions += 1
        self.runner._wake()
        async with asyncio.timeout(SECONDS):
            while (  # noqa: ASYNC110 - the runner has no event for it
                self.trainer.number is None and self._rested_after < self._num_actions and not self.task.done()
            ):
                await asyncio.sleep(0.0005)

    async def end(self) -> None:
        """Leaves the folder as it is."""
        self.task.cancel()
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            assert isinstance(self.task.exception(), Killed), self.task.exception()
        self.registry.database.close()

    async def create(self, name: str) -> None:
        add_model(self.registry, name, write=lambda checkpoint: (checkpoint / WEIGHTS).write_text(""))

    async def accept(self, model: RegisteredModel, key: str | None, body: str, number: int) -> JobRow:
        """What the train route does, with a batch instead of trajectories."""
        repeated = await self.runner.find_repeated(model, key, body)
        if repeated is not None:
            return repeated
        batch = Batch(groups=[], num_groups=number).model_dump_json().encode()
        payload = Payload(batch, pack_rows([{"trajectories": []}]))
        request = (model.number, key, body, TrainConfig(), payload, JobReport())
        return await asyncio.to_thread(self.queue.insert, *request)


@dataclass
class Expected:
    """A job as the machine expects it."""

    number: int
    model: str
    first_key: str | None
    key: str | None
    """None when it may name another job."""
    body: str
    job_id: str
    order: float
    state: str = "queued"
    is_retryable: bool = False
    waits: bool = False
    """It waits for a retry until time passes."""
    target: int | None = None
    """The step that its last attempt made or would have made."""
    num_deaths: int = 0
    num_deaths_here: int = 0
    """Since the server's start."""

    @property
    def is_pending(self) -> bool:
        return self.state in ("queued", "running")


@dataclass
class Steps:
    """A model as the machine expects it."""

    jobs: list[Expected] = field(default_factory=list)
    """The job that made each step, from step 1 on."""

    @property
    def weights(self) -> str:
        return "".join(f"{job.number} " for job in self.jobs)


class Jobs(RuleBasedStateMachine):
    """The machine."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="jobs-"))
        self.clock = FakeClock(stands=True)
        self.loop = asyncio.Runner()
        self.jobs: list[Expected] = []
        self.models: dict[str, Steps] = {}
        self.trained: Expected | None = None
        self.killed_at: str | None = None

    def teardown(self) -> None:
        self.loop.run(self.server.end())
        self.loop.close()
        shutil.rmtree(self.folder)

    # --- what is expected ---

    def pending(self, model: str | None = None) -> list[Expected]:
        """In the order in which they run."""
        jobs = [job for job in self.jobs if job.is_pending and model in (None, job.model)]
        return sorted(jobs, key=lambda job: (job.state == "queued", job.order))

    def next_job(self) -> Expected | None:
        waiting: set[str] = set()
        for job in self.pending():
            if job.waits:
                waiting.add(job.model)
            if job.model not in waiting:
                return job
        return None

    # --- what happens ---

    def act(self, action: Callable[[], Awaitable[Any]]) -> Any:
        """Does something, and lets the server come to rest."""

        async def whole() -> Any:
            try:
                return await action()
            finally:
                await self._settle()

        return self.loop.run(whole())

    async def _settle(self) -> None:
        await self.server.settle()
        while self.server.task.done():
            await self._restart()
            await self.server.settle()
        self.trained = self.next_job()
        if self.trained is not None:
            self.trained.state = "running"
            self.trained.target = len(self.models[self.trained.model].jobs) + 1

    async def _restart(self) -> None:
        await self.server.end()
        point, self.killed_at = self.killed_at, None
        if point == "job is running" and (job := self.next_job()) is not None:
            job.state, job.target = "running", len(self.models[job.model].jobs) + 1
        for job in self.jobs:
            job.waits, job.num_deaths_here = False, 0
        self.server = Server(self.folder, self.clock)

    @initialize()
    def start(self) -> None:
        async def begin() -> None:
            self.server = Server(self.folder, self.clock)

        self.loop.run(begin())
        for name in MODELS:
            self.create(name)

    @precondition(lambda self: len(self.models) < len(MODELS))
    @rule(name=st.sampled_from(MODELS))
    def create(self, name: str) -> None:
        if name not in self.models:
            self.act(lambda: self.server.create(name))
            self.models[name] = Steps()

    @rule(requests=st.lists(st.tuples(st.sampled_from(NAMES), KEYS), min_size=1, max_size=4))
    def accept(self, requests: list[tuple[str, str | None]]) -> None:
        for name, key in requests:
            if name in self.models:
                self._accept(name, key, "x")

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), body=st.sampled_from("xxxy"))
    def repeat_a_request(self, data: st.DataObject, body: str) -> None:
        job = data.draw(st.sampled_from(self.jobs), label="job")
        if job.model in self.models:
            self._accept(job.model, job.first_key, body)

    def _accept(self, name: str, key: str | None, body: str) -> None:
        model, number = self.server.registry.get("p", name), len(self.jobs) + 1
        same = [job for job in self.jobs if key and (job.model, job.key) == (name, key)]

        async def accept() -> str:
            job = await self.server.accept(model, key, body, number)
            if not same:
                order = float(number)
                self.jobs.append(Expected(number, name, key, key, body, job.job_id, order))
            elif same[0].state == "failed" and same[0].is_retryable:
                same[0].state, same[0].order = "queued", float(same[0].number)
                same[0].num_deaths = same[0].num_deaths_here = 0
            return job.job_id

        if same and same[0].body != body:
            assert self.refused(accept) == "key_reused"
        elif same:
            assert self.act(accept) == same[0].job_id
        else:
            self.act(accept)

    def refused(self, action: Callable[[], Awaitable[Any]]) -> str:
        with pytest.raises(Conflict) as raised:
            self.act(action)
        return raised.value.code

    @precondition(lambda self: self.trained is not None)
    @rule(outcomes=st.lists(st.sampled_from(["done", *POINTS, *ERRORS, "killed"]), min_size=1, max_size=5))
    def train(self, outcomes: list[str]) -> None:
        """What becomes of the jobs that train one after another."""
        for outcome in outcomes:
            if self.trained is None:
                self.let_time_pass()
            if self.trained is None:
                return
            if outcome == "killed":
                self.kill()
            elif outcome in ERRORS:
                self.fail(outcome)
            else:
                self.finish_the_training(outcome if outcome in POINTS else None)

    def finish_the_training(self, point: str | None) -> None:
        """The training ends well; the server may be killed on the way to the next."""
        job = self.trained
        assert job is not None
        if point not in BEFORE_THE_STEP:
            job.state = "done"
            self.models[job.model].jobs.append(job)
        with pytest.MonkeyPatch.context() as patches:
            if point is not None:
                self._arm(patches, point)

            async def say() -> None:
                self.server.trainer.say()

            self.act(say)

    def _arm(self, patches: pytest.MonkeyPatch, point: str) -> None:
        owner, name, is_after = POINTS[point]
        real, server = getattr(owner, name), self.server

        def reach() -> None:
            if self.server is server:
                self.killed_at = point
                raise Killed(point)

        def dying(*arguments: Any, **named: Any) -> Any:
            if not is_after:
                reach()
            result = real(*arguments, **named)
            if is_after:
                reach()
            return result

        patches.setattr(owner, name, dying)

    def fail(self, outcome: str) -> None:
        job, error = self.trained, ERRORS[outcome]
        assert job is not None
        is_doubtful = outcome in ("died", "unforeseen")
        if is_doubtful:
            job.num_deaths += 1
            job.num_deaths_here += 1

        async def say() -> None:
            self.server.trainer.say(error)
            await self.server.settle()
            has_failed = self.server.queue.get(job.job_id).state == "failed"
            if is_doubtful:  # those before the server's start may count, or not
                assert has_failed or job.num_deaths_here <= MAX_DEATHS
                assert not has_failed or job.num_deaths > MAX_DEATHS
            else:
                assert has_failed == (outcome == "own fault")
            if has_failed:
                job.state, job.is_retryable = "failed", outcome == "died"
            else:
                job.state, job.waits = "queued", True

        self.act(say)

    @precondition(lambda self: self.trained is not None)
    @rule()
    def die_until_it_fails(self) -> None:
        job = self.trained
        assert job is not None
        while job.state != "failed":
            self.fail("died")
            self.let_time_pass()
            while self.trained is not job and job.state != "failed":
                self.finish_the_training(None)

    @precondition(lambda self: any(job.waits for job in self.jobs))
    @rule()
    def let_time_pass(self) -> None:
        async def wait() -> None:
            self.clock.advance(LATER)

        for job in self.jobs:
            job.waits = False
        self.act(wait)

    @precondition(lambda self: self.pending())
    @rule()
    def kill(self) -> None:
        """The server dies while a job trains, or while none does, and starts again."""
        self.act(self._restart)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs), label="job")
        if job.waits:
            self.let_time_pass()

        async def cancel() -> None:
            await self.server.runner.cancel(job.job_id)
            job.state = "cancelled"

        if job.is_pending or job.state == "cancelled":
            self.act(cancel)
        else:
            assert self.refused(cancel) == "job_ended"

    @precondition(lambda self: len(self.pending()) > 1)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        self.let_time_pass()
        jobs = st.sampled_from(self.pending())
        job, before = data.draw(jobs, label="job"), data.draw(st.none() | jobs, label="before")

        async def move() -> None:
            next_id = None if before is None else before.job_id
            await self.server.runner.move(job.job_id, next_id)

        queued = [pending for pending in self.pending() if pending.state == "queued"]
        if job not in queued or (before is not None and before not in queued):
            assert self.refused(move) == "not_queued"
            return
        orders = [waiting.order for waiting in queued]
        if before is not job:
            queued.remove(job)
            queued.insert(len(queued) if before is None else queued.index(before), job)
        else:
            queued.remove(job)
            queued.append(job)
        for waiting, order in zip(queued, orders, strict=True):
            waiting.order = order
        self.act(move)

    @precondition(lambda self: any(steps.jobs for steps in self.models.values()))
    @rule(data=st.data(), is_killed=st.booleans())
    def roll_back(self, data: st.DataObject, is_killed: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.models)), label="model")
        steps = self.models[name]
        step = data.draw(st.integers(0, len(steps.jobs)), label="step")
        model = self.server.registry.get("p", name)

        async def roll_back() -> None:
            await self.server.checkpoints.roll_back(model, step)

        if self.pending(name):
            assert self.refused(roll_back) == "jobs_pending"
            return
        del steps.jobs[step:]
        self._forget_keys(name, step)
        self._change_folder(roll_back, "roll_back", is_killed)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), name=st.sampled_from(NAMES), is_killed=st.booleans())
    def rename(self, data: st.DataObject, name: str, is_killed: bool) -> None:
        before = data.draw(st.sampled_from(sorted(self.models)), label="model")
        model = self.server.registry.get("p", before)

        async def rename() -> None:
            await self.server.checkpoints.rename(model, name)

        if name in self.models:
            assert self.refused(rename) == "model_exists"
            return
        if self.pending(before):
            assert self.refused(rename) == "jobs_pending"
            return
        self.models[name] = self.models.pop(before)
        for job in self.jobs:
            if job.model == before:
                job.model = name
        self._change_folder(rename, "rename", is_killed)

    def _change_folder(self, change: Callable[[], Awaitable[None]], method: str, is_killed: bool) -> None:
        """The server changes a model, or dies when the change is committed and the model's folder has yet to follow."""

        def die(*_: object) -> None:
            raise Killed

        async def changed() -> None:
            with pytest.MonkeyPatch.context() as patches:
                if is_killed:
                    patches.setattr(ModelFolder, method, die)
                with contextlib.suppress(Killed):
                    await change()
            if is_killed:
                await self._restart()

        self.act(changed)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.models)), label="model")
        model = self.server.registry.get("p", name)

        async def delete() -> None:
            await self.server.checkpoints.delete_model(model)

        if self.pending(name):
            assert self.refused(delete) == "jobs_pending"
            return
        del self.models[name]
        self._forget_keys(name, None)
        self.act(delete)

    def _forget_keys(self, model: str, after: int | None) -> None:
        """The keys of ended jobs whose steps go can name new jobs."""
        for job in self.jobs:
            if job.model == model and (after is None or (job.target or 0) > after):
                job.key = None

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        """A client that comes late gets what the job is now."""
        job = data.draw(st.sampled_from(self.jobs), label="job")

        async def first_two() -> list[str]:
            events = self.server.runner.follow(job.job_id)
            seen = [(await anext(events)).event, (await anext(events)).event]
            await events.aclose()  # type: ignore[attr-defined]
            return seen

        kinds = {"queued": "waiting", "running": "progress", "done": "done"}
        assert self.loop.run(first_two()) == ["accepted", kinds.get(job.state, "error")]

    # --- what is always true ---

    @invariant()
    def one_job_trains_and_it_is_the_next(self) -> None:
        assert not self.server.task.done()
        expected = None if self.trained is None else self.trained.number
        assert self.server.trainer.number == expected

    @invariant()
    def each_job_is_where_it_should_be(self) -> None:
        queue = self.server.queue
        rows = {job.number: queue.get(job.job_id) for job in self.jobs}
        assert {number: job.state for number, job in rows.items()} == {job.number: job.state for job in self.jobs}
        assert [waiting.job_id for waiting in queue.waiting()] == [job.job_id for job in self.pending()]
        for job in self.jobs:
            error = rows[job.number].last_error
            if job.state == "failed":
                assert isinstance(error, ErrorDetail) and error.retryable == job.is_retryable

    @invariant()
    def steps_are_contiguous_and_each_job_made_its_own(self) -> None:
        for name, steps in self.models.items():
            model = self.server.registry.get("p", name)
            numbers = list(range(len(steps.jobs) + 1))
            assert model.folder.steps() == numbers and model.step == numbers[-1]
            weights = model.folder.checkpoint_dir(model.step) / WEIGHTS
            assert weights.read_text() == steps.weights
            job_ids = [job.job_id for job in steps.jobs]
            assert [model.folder.read_checkpoint(n).job_id for n in numbers[1:]] == job_ids
            assert model.history.columns(())["steps"] == numbers[1:]
            for job, step in zip(steps.jobs, numbers[1:], strict=True):
                row = self.server.queue.get(job.job_id)
                assert (row.state, row.target_step) == ("done", step)
                assert model.folder.trajectories_file("train", step).exists()
            assert not list(model.folder.checkpoints_dir.glob(".*.tmp")) or (
                self.trained is not None and self.trained.model == name
            )


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
