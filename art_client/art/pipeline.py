"""`PipelineTrainer`: samples the next groups while a step trains, and trains no group that is too old.

    trainer = art.PipelineTrainer(
        model, backend, rollout_fn, scenarios, config, groups_per_step=8, max_steps_off_policy=1,
        train_config=art.TrainConfig(learning_rate=1e-5),
    )
    await trainer.train()

`rollout_fn(model, scenario, config)` returns the group of one scenario. A group begins only if a job will train it within the
bound (`pacing.py`), so no group is thrown away. On separate devices rollouts continue while a step trains; on a shared device
the server pauses the rollouts. `pipeline_file.py` keeps finished groups for a program that starts again.
"""

# pyright: reportPrivateUsage=false

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Never, TypeAlias, TypeVar

from art.bars import make_bar
from art.bodies import build_train_request
from art.contained import contained
from art.core.gather import gather_trajectory_groups
from art.core.model import TrainableModel
from art.errors import ArtError, ArtJobError, ArtStatusError
from art.pacing import Open, Pace
from art.pipeline_file import PipelineFile
from art.pool import DEFAULT_MAX_EXCEPTIONS, format_numbers
from art.trajectories import Trajectory, TrajectoryGroup
from art.types import TrainConfig, TrainResult, to_train_config

if TYPE_CHECKING:
    from art.core.backend import Backend

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=TrainableModel)
S = TypeVar("S")
C = TypeVar("C")
Samples: TypeAlias = Sequence[Trajectory | TrajectoryGroup]

REFUSED_ARGUMENTS = {
    name: instead
    for instead, names in {
        "its place is train_config=art.TrainConfig(...)": "learning_rate loss_fn loss_fn_config normalize_advantages adam_params "
        "kl_penalty_coef kl_penalty_step_lag grad_accumulation_sequences",
        "it is max_concurrent here": "num_rollout_workers",
        "each step trains groups_per_step groups": "min_batch_size max_batch_size pipeline autotune queue_maxsize",
        "no group is discarded here": "discard_queue_multiplier limit_mean_steps_off_policy score_reference_groups_per_step "
        "score_reference_rollouts_per_group",
        "each step is saved here; model.delete_checkpoints deletes old ones": "save_checkpoint optimizer_save_interval "
        "checkpoint_retention_strategy checkpoint_retention_interval",
        "the first step is always evaluated": "eval_at_start eval_step_0",
        "a pipeline always resumes; a model of another name begins anew": "resume",
        "`art tail` and the page show the run": "log_interval_seconds status_ewa_alpha total_scenarios",
        "rollouts run in the program's own event loop": "rollout_executor",
    }.items()
    for name in names.split()
}
"""Arguments of ART's PipelineTrainer, with what they are here."""


class PipelineTrainer(Generic[S, C]):
    """Trains a model on groups that are sampled meanwhile. A group is at most `max_steps_off_policy` steps older than the
    step at which its job starts.

    `rollout_fn(model, scenario, config)` returns a `TrajectoryGroup`. `scenarios` is any iterable that gives the same
    scenarios in the same order at each start of the program. Each scenario is one group, and the pipeline ends with the
    scenarios. Each step trains `groups_per_step` groups, the oldest first. `max_steps_off_policy` = 0 samples and trains in
    turns. `max_concurrent` limits the groups that are sampled at a time (None: as many as the bound allows). `max_steps`
    counts the steps of the pipeline, over all starts.

    `eval_fn(model, step, config)` gets a copy of the model that samples from `step`, and returns trajectories or groups,
    or a mapping from splits to these; they are logged ("val"). It is called for the first step, and for each step that is
    a multiple of `eval_every_n_steps` (0: for none), while training goes on.

    Raises:
        ValueError, TypeError: an argument is out of range or unknown.
    """

    # Any: the program's class of models
    _model: TrainableModel[Any]
    _rollout_fn: Callable[[Any, S, C], Awaitable[TrajectoryGroup]]
    _eval_fn: Callable[[Any, int, C], Awaitable[Samples | Mapping[str, Samples]]] | None
    _file: PipelineFile
    _first_step: int
    _step: int
    """The newest step that the pipeline knows to serve."""
    _evaluated: int | None
    _finished: set[Open]
    """Groups that no job has taken."""

    def __init__(
        self,
        model: M,
        backend: "Backend",
        rollout_fn: Callable[[M, S, C], Awaitable[TrajectoryGroup]],
        scenarios: Iterable[S],
        config: C,
        eval_fn: Callable[[M, int, C], Awaitable[Samples | Mapping[str, Samples]]] | None = None,
        *,
        groups_per_step: int = 4,
        max_steps_off_policy: int = 1,
        max_concurrent: int | None = None,
        eval_every_n_steps: int = 20,
        max_steps: int | None = None,
        train_config: TrainConfig | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            reasons = [f"{name} ({REFUSED_ARGUMENTS.get(name, 'no such argument')})" for name in unknown]
            raise TypeError(f"art.PipelineTrainer does not take {', '.join(reasons)}")
        least = {
            "groups_per_step": (groups_per_step, 1),
            "max_steps_off_policy": (max_steps_off_policy, 0),
            "max_concurrent": (max_concurrent, 1),
            "eval_every_n_steps": (eval_every_n_steps, 0),
            "max_steps": (max_steps, 0),
        }
        for name, (value, minimum) in least.items():
            if value is not None and value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {value}")
        if not isinstance(scenarios, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"scenarios is {type(scenarios).__name__}, not an iterable: pass a list or a generator")
        if model.backend() is not backend:
            raise ValueError(
                f"model '{model.name}' is registered with another backend than the pipeline's: pass that one"
            )
        self._model, self._backend = model, backend
        self._rollout_fn, self._scenarios, self._config, self._eval_fn = rollout_fn, scenarios, config, eval_fn
        self._pace = Pace(groups_per_step, max_steps_off_policy)
        self._max_concurrent = math.inf if max_concurrent is None else max_concurrent
        self._eval_every = eval_every_n_steps
        self._max_steps = math.inf if max_steps is None else max_steps
        self._train_config = to_train_config(train_config)
        self._recent: deque[tuple[int, int]] = deque(maxlen=groups_per_step)
        """For each of the groups that finished last the number of failed rollouts, and the number of all rollouts."""

    async def train(self) -> None:
        """Samples and trains until the scenarios or the steps end.

        A program that is started again continues: finished groups, in `.art/.pipelines`, are trained, and groups that ran are
        sampled again. If a job was refused, cancelled or failed, the next start requests the job once more. If the job cannot
        be trained then either, all finished groups are given up with a warning, and their scenarios are sampled again.
        As in a gather, a tenth of a step's rollouts may fail.

        Raises:
            ArtError: another program trains the model, or runs this pipeline; or too many rollouts failed.
            ArtStatusError: the server refuses the job of a step.
            ArtJobError: the job of a step failed.
            ArtConnectionError: no server answers in time.
            Exception: `eval_fn` raised this exception.
        """
        folder = self._backend._log_dir.parent / ".pipelines" / self._model.project
        step = await self._model.get_step()
        self._file = await asyncio.to_thread(PipelineFile, folder / f"{self._model._storage_name}.sqlite", step)
        tasks: set[asyncio.Task[Any]] = set()
        try:
            await self._resume()
            await self._run(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._file.close)

    async def _resume(self) -> None:
        """Ends the job of an earlier start, and gives up groups that no job can train any more."""
        file = self._file
        job = file.job()
        if job is not None:
            try:
                await self._train_job(job)
            except (ArtStatusError, ArtJobError, ValueError) as error:
                await self._settle_refused(error)
        # After the job, which may have made a step.
        self._step = await self._model.get_step()
        num_undone = await asyncio.to_thread(file.undo_after, self._step)
        if num_undone:
            logger.warning(
                "%s is back at step %d: %d later groups are sampled again", file.path, self._step, num_undone
            )
        self._first_step, self._evaluated = file.first_step(), file.evaluated()
        waiting = file.waiting()
        self._finished = set(self._pace.keep(waiting, self._step))
        late = [group for group in waiting if group not in self._finished]
        if late:
            logger.warning(
                "%d finished groups are more than max_steps_off_policy=%d steps older than step %d, or would become so: they "
                "are sampled again",
                *(len(late), self._pace.max_steps_off_policy, self._step),
            )
            await asyncio.to_thread(file.forget, late)

    async def _settle_refused(self, error: ArtStatusError | ArtJobError | ValueError) -> None:
        """Decides what becomes of the groups of an earlier start after the error that refused or ended their job. If they are
        given up, so are the other finished groups: jobs of the same program and model would end in the same error.

        Raises:
            ArtStatusError: the same job may succeed later.
        """
        if isinstance(error, ArtStatusError):
            if error.retryable:
                raise error
            if error.code == "step_moved":
                await asyncio.to_thread(self._file.return_job)
                return
        num_groups = await asyncio.to_thread(self._file.give_up)
        logger.warning(
            "%d finished groups of an earlier start are given up, and their scenarios sampled again, because their job cannot "
            "be trained: %s",
            *(num_groups, error),
        )

    async def _run(self, tasks: set[asyncio.Task[Any]]) -> None:
        """The loop: begins groups, a job and an evaluation where it may, and waits for the first of `tasks` to end."""
        end = self._first_step + self._max_steps
        taken = self._file.numbers()
        scenarios = ((number, scenario) for number, scenario in enumerate(self._scenarios) if number not in taken)
        is_exhausted = False
        running: dict[asyncio.Task[None], Open] = {}
        job: asyncio.Task[TrainResult] | None = None
        evaluation: asyncio.Task[None] | None = None
        with make_bar(desc="pipeline", total=None if end == math.inf else end, initial=self._step) as bar:
            while True:
                next_job = self._step if job is None else self._step + 1
                num_open = len(self._finished) + len(running)
                num_allowed = min(
                    self._pace.room(num_open, self._step, next_job),
                    self._max_concurrent - len(running),
                    (end - next_job) * self._pace.groups_per_step - num_open,
                )
                for _ in range(max(0, int(num_allowed))):
                    numbered = next(scenarios, None)
                    if numbered is None:
                        is_exhausted = True
                        break
                    number, scenario = numbered
                    group = Open(self._step, number)
                    running[asyncio.create_task(self._sample(group, scenario))] = group
                if job is None and self._step < end:
                    batch = self._pace.choose(self._finished, running.values(), self._step, is_last=is_exhausted)
                    if batch:
                        self._finished -= set(batch)
                        job = asyncio.create_task(self._train(batch))
                if evaluation is None and (due := self._due_evaluation()) is not None:
                    evaluation = asyncio.create_task(self._evaluate(due))
                bar.set_postfix_str(
                    format_numbers({"running": len(running), "waiting": len(self._finished)}), refresh=False
                )
                tasks |= {*running, *filter(None, (job, evaluation))}
                if not tasks:
                    return
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                tasks -= done
                for task in [*running]:
                    if task in done:
                        self._finished.add(running.pop(task))
                if job is not None and job.done():
                    self._step, job = job.result().step, None
                    bar.update(self._step - bar.n)
                if evaluation is not None and evaluation.done():
                    evaluation = None

    async def _sample(self, group: Open, scenario: S) -> None:
        """Samples the group of a scenario into the file.

        Raises:
            ArtError: too many rollouts have failed.
            ValueError: the group cannot be trained on.
        """

        async def sample_group() -> TrajectoryGroup:
            return await self._rollout_fn(self._model, scenario, self._config)

        (sampled,) = await gather_trajectory_groups([sample_group()], pbar_desc=None, max_exceptions=math.inf)
        num_failed = len(sampled.exceptions)
        self._recent.append((num_failed, num_failed + len(sampled)))
        expected = self._pace.groups_per_step * max(total for _, total in self._recent)
        if num_failed and sum(failed for failed, _ in self._recent) > DEFAULT_MAX_EXCEPTIONS * expected:
            first = sampled.exceptions[0]
            raise ArtError(
                f"more than a tenth of the rollouts of the last {self._pace.groups_per_step} groups failed. The latest:\n"
                f"{first.traceback or f'{first.type}: {first.message}'}"
            )
        await asyncio.to_thread(build_train_request, [sampled], TrainConfig())  # raises for what no job can contain
        await asyncio.to_thread(self._file.add, group, sampled.model_dump_json(warnings=False))

    async def _train(self, batch: Sequence[Open]) -> TrainResult:
        """Trains finished groups: the next step."""
        step = self._step
        config = self._train_config.model_dump_json(exclude_unset=True)
        await asyncio.to_thread(self._file.begin_job, step, batch, config)
        try:
            result = await self._train_job(step)
        except ArtStatusError as error:
            if error.code != "step_moved":
                raise
            await asyncio.to_thread(self._file.return_job)
            raise ArtError(
                f"another program trains '{self._model.name}': this pipeline's next step is {step + 1}, and {error}. A "
                "pipeline must be the only one: stop the other program, or take a model of another name, then start again"
            ) from error
        logger.info(
            "step %d: trained %d groups, at most %d steps off policy; %d others are finished",
            *(result.step, len(batch), step - batch[0].began, len(self._finished)),
        )
        return result

    async def _train_job(self, step: int) -> TrainResult:
        """The result of the job in the file. The idempotency key makes a repeated request the same job on the server."""
        key, config, bodies = await asyncio.to_thread(self._file.read_job)
        groups = await asyncio.to_thread(lambda: [TrajectoryGroup.model_validate_json(body) for body in bodies])
        job = await self._model.submit(
            groups, TrainConfig.model_validate_json(config), idempotency_key=key, expected_step=step
        )
        result = await job
        await asyncio.to_thread(self._file.end_job)
        return result

    def _due_evaluation(self) -> int | None:
        """The step to evaluate next; None if all due steps are evaluated. Steps are evaluated one after the other, and no step
        is left out."""
        if self._eval_fn is None or not self._eval_every:
            return None
        evaluated = self._evaluated
        due = self._first_step if evaluated is None else (evaluated // self._eval_every + 1) * self._eval_every
        return due if due <= self._step else None

    async def _evaluate(self, step: int) -> None:
        """Evaluates a step, if the server still has the step."""
        assert self._eval_fn is not None, "an evaluation is due only with eval_fn"
        if step < self._step and step not in [checkpoint.step for checkpoint in await self._model.checkpoints()]:
            logger.warning("step %d is not evaluated: the server has deleted it meanwhile", step)
            await self._set_evaluated(step)
            return
        with contained("eval_fn"):
            samples = await self._eval_fn(self._model._pinned(step), step, self._config)
        splits = samples if isinstance(samples, Mapping) else {"val": samples}
        for split, entries in splits.items():
            groups = [entry for entry in entries if isinstance(entry, TrajectoryGroup)]
            alone = [entry for entry in entries if isinstance(entry, Trajectory)]
            if alone:
                groups.append(TrajectoryGroup(alone))
            await self._model.log(groups, split, step=step)
        await self._set_evaluated(step)

    async def _set_evaluated(self, step: int) -> None:
        await asyncio.to_thread(self._file.set_evaluated, step)
        self._evaluated = step
