"""Runs: from a file to the last epoch.

await art.finetune.run("finetune.yml", {"finetuning.num_epochs": 3})
"""

import contextlib
import os
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import art
from art.finetune import checking, components, reading, toolkit
from art.finetune.agent import Agent, num_answers
from art.finetune.context import Run, say
from art.finetune.errors import FinetuneError, NoServer, NoSignal, WrongInput
from art.finetune.folder import Folder
from art.finetune.interfaces import Trainer, TrainerAdapter, TrainingJobStatus, TrajectoryBuilder
from art.finetune.rows import Row, Rows, load_rows
from art.finetune.scoring import Reward
from art.finetune.sections import Backend, Config, Dataset, RewardFunction
from art.finetune.workflows import Workflow, make_workflow

Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """A checked file with its rows. Nothing was asked of a server."""

    config: Config
    policy: str | None
    """The policy's entry of `llms`."""
    train_config: art.TrainConfig
    rows: list[Row]
    validation_rows: list[Row]


def prepare(file: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> Job:
    """Checks a file and reads its rows.

    Raises:
        WrongInput: all that is wrong with it.
    """
    given = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    if isinstance(file, Mapping):
        document = reading.of_dict(file, given)
    else:
        document = reading.read(Path(file), given)
    known = toolkit.find()
    config = checking.check(document, known)
    if ignored := checking.without_effect(config):
        say(f"without effect here: {', '.join(ignored)}")
    problems: list[str] = []
    training, validation = config.eval.general.dataset, config.finetuning.validation.dataset
    rows = _load("eval.general.dataset", training, problems)
    if validation is not None:
        same = {"id_key", "structure", "filter"} - validation.model_fields_set
        validation = validation.model_copy(update={name: getattr(training, name) for name in same})
    validation_rows = _load("finetuning.validation.dataset", validation, problems)
    if problems:
        raise WrongInput(problems)
    return Job(config, checking.policy_llm(config), _train_config(config), rows, validation_rows)


def _load(name: str, dataset: Dataset | None, problems: list[str]) -> list[Row]:
    if dataset is None:
        return []
    try:
        rows: Rows = load_rows(dataset)
    except WrongInput as error:
        problems += [f"{name}: {problem}" for problem in error.problems]
        return []
    if rows.left_out:
        say(f"{name}: {rows.left_out} rows without a question are left out")
    return rows.rows


def _train_config(config: Config) -> art.TrainConfig:
    given = config.adapter.training.model_dump(include=set(art.TrainConfig.model_fields), exclude_unset=True)
    if config.builder.num_generations == 1 and not {"baseline", "scaling", "preset"} & given.keys():
        say(
            "num_generations is 1: rewards are standardised over the whole batch. Two or more compare rollouts of one row"
        )
        given |= {"baseline": "none", "scaling": "batch_std"}
    return art.TrainConfig.model_validate(given)


@contextlib.asynccontextmanager
async def connected(config: Config) -> AsyncGenerator[art.TrainableModel]:
    """The run's model on its server, which is started if the file names none.

    Raises:
        NoServer: no server answers, or none can be started.
    """
    section = config.adapter.backend
    backend, place = _backend(section)
    fields: dict[str, Any] = {"name": section.name, "project": section.project, "base_model": section.base_model}
    if internal := _internal_config(section):
        fields["_internal_config"] = internal
    model = art.TrainableModel(**fields)
    async with backend:
        try:
            await model.register(backend)
        except art.ArtConnectionError as error:
            raise NoServer(
                f"Failed to connect to ART backend: {error}. Start `art-server`, or check {place}; "
                f"`curl {backend.base_url}/health` shows whether it answers"
            ) from error
        except art.ArtStatusError as error:
            raise FinetuneError(f"{place} refuses the model: {error}") from error
        except art.ArtError as error:  # of a server that this program starts
            raise NoServer(str(error)) from error
        yield model


def _backend(section: Backend) -> tuple[art.Backend, str]:
    """The backend, and what names it."""
    key = None if section.api_key == "default" else section.api_key
    if section.url is not None:
        return art.Backend(section.url, key), "backend.url"
    if section.ip is not None:
        host = "127.0.0.1" if section.ip == "0.0.0.0" else section.ip
        return art.Backend(f"http://{host}:{section.port or 7623}", key), "backend.ip and backend.port"
    if os.environ.get("ART_SERVER_URL"):
        return art.Backend(api_key=key), "ART_SERVER_URL"
    return art.LocalBackend(), "the server that this program starts"


def _internal_config(section: Backend) -> dict[str, Any] | None:
    return section.model_dump(include={"init_args", "engine_args"}, exclude_none=True) or None


class Workflows:
    """The workflow and the evaluators of a file. A context manager, which closes what the toolkit built."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._made = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Workflows":
        await self._made.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._made.__aexit__(*error)

    async def agent(self, model: art.TrainableModel, reward: RewardFunction) -> Agent:
        """What plays a row.

        Raises:
            WrongInput: a module cannot be imported.
        """
        config = self._job.config
        try:
            made: dict[str, Any] = {}
            workflow: Workflow
            if toolkit.is_needed(config):
                built = await self._made.enter_async_context(toolkit.build(config, self._job.policy, model))
                made = built.evaluators
                workflow = built.workflow or make_workflow(config.workflow, model)
            else:
                workflow = make_workflow(config.workflow, model)
            return Agent(
                workflow=workflow,
                reward=Reward(config, reward, made),
                llms=config.llms,
                policy=self._job.policy,
                targets=frozenset(config.finetuning.target_functions),
                timeout_seconds=config.eval.general.rollout_timeout_seconds,
            )
        except ValueError as error:
            raise WrongInput([str(error)]) from error


async def run(
    file: str | Path | Mapping[str, Any], overrides: Overrides = (), *, fresh: bool = False
) -> list[TrainingJobStatus]:
    """Trains what a file describes, or continues the run in its output folder. Returns how each epoch of this call ended.

    `overrides` are values by dotted name, which win over the file.

    Raises:
        WrongInput: the file, a data set or an override is wrong, or the folder has another run.
        NoServer: no server answers.
        NoSignal: in no epoch did rewards differ.
        FinetuneError: rollouts or training failed.
    """
    job = prepare(file, overrides)
    config = job.config
    finetuning = config.finetuning
    dumped = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    with Folder.open(finetuning.output_dir, dumped, finetuning.num_epochs, fresh=fresh) as folder:
        if len(folder.epochs) >= finetuning.num_epochs:
            say(f"{folder.path}: all {finetuning.num_epochs} epochs are trained already")
            return []
        try:
            async with connected(config) as model, Workflows(job) as workflows:
                return await _train(job, folder, model, workflows)
        except art.ArtConnectionError as error:
            raise NoServer(f"the server was lost: {error}. The same command continues when it is back") from error


async def _train(job: Job, folder: Folder, model: art.TrainableModel, workflows: Workflows) -> list[TrainingJobStatus]:
    config, finetuning = job.config, job.config.finetuning
    if folder.noted("seed") is None:
        folder.note("seed", random.randrange(2**31) if finetuning.seed is None else finetuning.seed)
        if step := await model.get_step():
            say(f"{model.get_inference_name()} exists: it is trained further from step {step}")
    agent = await workflows.agent(model, finetuning.reward_function)
    validation_agent = agent
    if job.validation_rows and finetuning.validation.reward is not None:
        validation_agent = await workflows.agent(model, finetuning.validation.reward)
    shared = Run(
        config=config,
        rows=job.rows,
        validation_rows=job.validation_rows,
        train_config=job.train_config,
        model=model,
        agent=agent,
        validation_agent=validation_agent,
        folder=folder,
        seed=folder.noted("seed"),
    )
    trainer = await make_trainer(shared)
    try:
        statuses = await trainer.run(finetuning.num_epochs)
    except (art.ArtError, FinetuneError):
        raise
    except Exception as error:  # the first failure of a rollout, which gather raises
        notes = "; ".join(getattr(error, "__notes__", []))
        raise FinetuneError(f"rollouts failed: {type(error).__name__}: {error} ({notes})") from error
    finally:
        await trainer.cleanup()
    _summarise(folder, model)
    return statuses


async def make_trainer(shared: Run) -> Trainer:
    """The three parts, bound and initialised."""
    config = shared.config
    builder: TrajectoryBuilder = components.load("trajectory_builder", config.builder.type)(config.builder)
    adapter: TrainerAdapter = components.load("trainer_adapter", config.adapter.type)(config.adapter)
    trainer: Trainer = components.load("trainer", config.trainer.type)(config.trainer)
    await trainer.bind_components(builder, adapter)
    for part in (builder, adapter, trainer):
        await part.initialize(shared)
    return trainer


def _summarise(folder: Folder, model: art.TrainableModel) -> None:
    epochs = folder.epochs
    first, last = epochs[0].avg_reward, epochs[-1].avg_reward
    if first is None or last is None:
        raise FinetuneError("no trajectories: each rollout failed; training_metrics.jsonl has the reasons")
    if not any(each.filtered_groups for each in epochs):
        raise NoSignal(
            "in no epoch were there trajectories to train on: the rewards of each group were equal, or differed by less than "
            "curriculum_learning.min_reward_diff. Lower it, raise num_generations, or use rows that the model neither always "
            "solves nor always fails"
        )
    say(
        f"{model.get_inference_name()}: reward {first:.4f} in epoch 1, {last:.4f} in epoch {len(epochs)}; {folder.path}"
    )
    if last <= first and len(epochs) > 1:
        share = sum(each.num_without_signal for each in epochs) / sum(each.num_groups for each in epochs)
        say(
            f"rewards did not rise. {share:.0%} of the groups had equal rewards, which train nothing. Raise num_generations, try "
            "curriculum_learning or another learning_rate, and check that good answers get more than bad ones"
        )


async def check(file: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> None:
    """Rolls out and scores the first row, and prints what would be trained. Trains nothing, and leaves the folder alone.

    Raises:
        FinetuneError: as `run` does.
    """
    job = prepare(file, overrides)
    async with connected(job.config) as model, Workflows(job) as workflows:
        agent = await workflows.agent(model, job.config.finetuning.reward_function)
        session = f"check-{random.randrange(16**8):08x}"
        try:
            trajectory, output = await agent.play(model, job.rows[0], session, job.config.finetuning.seed or 0)
        except Exception as error:
            raise FinetuneError(f"the rollout failed: {type(error).__name__}: {error}") from error
        print(describe(trajectory, output))


def describe(trajectory: art.Trajectory, output: Any) -> str:
    """A rollout as text: its conversations, with the answers that would be trained marked by ">"."""
    lines: list[str] = []
    for number, history in enumerate([trajectory, *trajectory.additional_histories], 1):
        if number > 1:
            lines.append(f"--- conversation {number}")
        messages: list[Any] = history.messages()
        for entry, message in zip(history.messages_and_choices, messages, strict=True):
            mark = " " if isinstance(entry, dict) else ">"
            calls = f" {message['tool_calls']}" if message.get("tool_calls") else ""
            lines.append(f"{mark} {message['role']}: {message.get('content')}{calls}")
    lines += [f"output: {output}", f"reward: {trajectory.reward:g}"]
    lines += [f"{name}: {value:g}" for name, value in trajectory.metrics.items()]
    lines.append(f"{num_answers(trajectory)} answers would be trained")
    return "\n".join([*lines, *trajectory.logs])
