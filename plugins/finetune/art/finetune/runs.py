"""Runs: from a file to the loop over the epochs, which is `training.ArtTrainer.run`.

await art.finetune.run("finetune.yml", {"finetuning.num_epochs": 3})
"""

import contextlib
import os
import random
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import art
from art.contained import contained
from art.finetune import checking, components, folder, reading, toolkit
from art.finetune.agent import Agent, num_answers, reason_of
from art.finetune.errors import FinetuneError, NoServer, NoSignal, WrongInput
from art.finetune.interfaces import CheckedFile, Connected, Run, Trainer, TrainingJobStatus, say
from art.finetune.losing import is_lost, server_lost
from art.finetune.rows import DatasetRow, digest, load_rows
from art.finetune.scoring import Reward, rows_that_cannot_be_judged
from art.finetune.sections import BackendSection, Config, DatasetSection, RewardFunction
from art.finetune.workflows import make_workflow, unused_llm_fields

Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


def prepare(file: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> CheckedFile:
    """Checks a file and reads its rows.

    Raises:
        WrongInput: all problems of the file and its data sets.
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    document = reading.of_dict(file, pairs) if isinstance(file, Mapping) else reading.read(Path(file), pairs)
    config = checking.check(document, toolkit.find())
    if ignored := checking.without_effect(config):
        say(f"without effect here: {', '.join(ignored)}")
    problems: list[str] = []
    training, validation = config.eval.general.dataset, config.finetuning.validation.dataset
    rows = _load("eval.general.dataset", training, problems)
    if validation is not None:
        same = {"id_key", "structure", "filter"} - validation.model_fields_set
        validation = validation.model_copy(update={name: getattr(training, name) for name in same})
    validation_rows = _load("finetuning.validation.dataset", validation, problems)
    finetuning = config.finetuning
    problems += _unjudged("eval.general.dataset", config, finetuning.reward_function, rows, training)
    if validation is None:  # `art eval` then evaluates the training rows
        problems += _unjudged("eval.general.dataset", config, finetuning.validation.reward, rows, training)
    else:
        reward = finetuning.validation.reward or finetuning.reward_function
        problems += _unjudged("finetuning.validation.dataset", config, reward, validation_rows, validation)
    if problems:
        raise WrongInput(problems)
    return CheckedFile(config, _train_config(config), rows, validation_rows)


def _unjudged(
    name: str, config: Config, reward: RewardFunction | None, rows: list[DatasetRow], dataset: DatasetSection
) -> list[str]:
    """A line for each row of a data set that a reward cannot judge."""
    if reward is None:
        return []
    problems = rows_that_cannot_be_judged(config, reward, rows, dataset.structure.answer_key)
    return [f"{name}: {dataset.file_path or dataset.function}: {problem}" for problem in problems]


def _load(name: str, dataset: DatasetSection | None, problems: list[str]) -> list[DatasetRow]:
    if dataset is None:
        return []
    try:
        loaded = load_rows(dataset)
    except WrongInput as error:
        problems += [f"{name}: {problem}" for problem in error.problems]
        return []
    if loaded.left_out:
        say(f"{name}: {loaded.left_out} rows without a question are left out")
    return loaded.rows


def _train_config(config: Config) -> art.TrainConfig:
    fields = config.adapter.training.model_dump(include=set(art.TrainConfig.model_fields), exclude_unset=True)
    if config.builder.num_generations == 1 and not {"baseline", "scaling", "preset"} & fields.keys():
        say(
            "num_generations is 1: rewards are standardised over the whole batch. Two or more compare rollouts of one row"
        )
        fields |= {"baseline": "none", "scaling": "batch_std"}
    return art.TrainConfig.model_validate(fields)


@contextlib.asynccontextmanager
async def connected(checked_file: CheckedFile) -> AsyncGenerator[Connected]:
    """Connects with the server, or starts a server if the file names none, and builds workflow and evaluators.

    Raises:
        WrongInput: a module cannot be imported.
        NoServer: no server answers, no server can be started, or the server was lost in the block.
        FinetuneError: the server refuses the model, or the block raised any other error.
    """
    config = checked_file.config
    policy, finetuning = checking.policy_llm(config), config.finetuning
    async with contextlib.AsyncExitStack() as opened:
        backend = await opened.enter_async_context(_backend(config.adapter.backend))
        model = await _register(config, backend)
        if finetuning.seed is not None:
            random.seed(finetuning.seed)  # for workflows that draw from `random`
        try:
            workflow, evaluators = await opened.enter_async_context(toolkit.building(config, policy, model))
            if workflow is None:
                workflow = make_workflow(config.workflow, model)
                if unused := unused_llm_fields(config.workflow, config.llms, policy):
                    say(
                        f"without effect here: {', '.join(unused)}: the workflow asks OPENAI_MODEL with its own parameters; a "
                        "function with a parameter `llms` gets them"
                    )
            agent = Agent(
                workflow=workflow,
                reward=Reward(config, finetuning.reward_function, evaluators),
                llms=config.llms,
                policy=policy,
                targets=frozenset(finetuning.target_functions),
                timeout_seconds=config.eval.general.rollout_timeout_seconds,
                is_seeded=finetuning.seed is not None,
            )
            validation_agent = agent
            if finetuning.validation.reward is not None:
                validation_agent = replace(agent, reward=Reward(config, finetuning.validation.reward, evaluators))
        except ValueError as error:
            raise WrongInput([str(error)]) from error
        try:
            with contained("a part of the run"):
                yield Connected(**vars(checked_file), model=model, agent=agent, validation_agent=validation_agent)
        except FinetuneError:
            raise
        except Exception as error:  # the first failure of a rollout, which gather raises
            if isinstance(error, art.ArtConnectionError) or await is_lost(model):
                raise server_lost(model, error) from error
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
            raise FinetuneError(f"rollouts failed: {reason_of(error)}{notes}") from error


async def _register(config: Config, backend: art.Backend) -> art.TrainableModel:
    """The file's model, which the server knows.

    Raises:
        NoServer: no server answers, or no server can be started.
        FinetuneError: the server refuses the model.
    """
    section = config.adapter.backend
    fields = section.model_dump(include={"name", "project", "base_model"})
    engine_args = section.engine_args.model_dump(exclude_none=True) if section.engine_args is not None else {}
    if section.init_args is not None and section.init_args.max_seq_length is not None:
        engine_args["max_seq_length"] = section.init_args.max_seq_length
    model = art.TrainableModel(**fields, lora=section.lora, engine_args=engine_args)
    try:
        await model.register(backend)
    except art.ArtConnectionError as error:
        raise NoServer(
            f"Failed to connect to ART backend: {error}. Start `art-server`, or check the address in the adapter's "
            f"backend: `curl {backend.base_url}/health` shows whether it answers"
        ) from error
    except art.ArtStatusError as error:
        remedy = ""
        if error.code == "lora_differs":
            adapter = f"trainer_adapters.{config.finetuning.trainer_adapter}"
            remedy = f". Set another {adapter}.backend.name, or leave {adapter}.backend.lora out"
        raise FinetuneError(f"the server refuses the model: {error}{remedy}") from error
    except art.ArtError as error:  # a server that this program starts has failed
        raise NoServer(str(error)) from error
    return model


def _backend(section: BackendSection) -> art.Backend:
    key, url = section.api_key, section.url
    if section.ip is not None:
        host = "127.0.0.1" if section.ip == "0.0.0.0" else section.ip
        url = f"http://{host}:{section.port or 7623}"
    if url is None and not os.environ.get("ART_SERVER_URL"):
        return art.LocalBackend()
    return art.Backend(url, None if key == "default" else key)


async def run(
    file: str | Path | Mapping[str, Any], overrides: Overrides = (), *, fresh: bool = False
) -> list[TrainingJobStatus]:
    """Trains the run of a file, or continues the run in the output folder. Returns how each epoch of this call ended.

    `overrides` are values by dotted name. An override wins over the file.

    Raises:
        WrongInput: the file, a data set or an override is wrong, or the folder has another run.
        NoServer: no server answers.
        NoSignal: in no epoch did rewards differ.
        FinetuneError: rollouts or training failed.
    """
    checked_file = prepare(file, overrides)
    finetuning = checked_file.config.finetuning
    dumped = checked_file.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    digests = {
        "rows": digest(checked_file.rows),
        "validation": digest(checked_file.validation_rows, _scoring_of_validations(checked_file.config)),
    }
    with folder.opened(finetuning.output_dir, dumped, **digests, fresh=fresh) as output:
        if len(output.state.epochs) >= finetuning.num_epochs:
            say(f"{output.path}: all {finetuning.num_epochs} epochs are trained already")
            return []
        async with connected(checked_file) as connection:
            name = connection.model.get_inference_name()
            is_new = not output.state.epochs and output.state.step is None
            if is_new and (step := await connection.model.get_step()):
                say(f"{name} exists: it is trained further from step {step}")
            seed = output.state.seed if finetuning.seed is None else finetuning.seed
            trainer = _make_trainer(Run(**vars(connection), folder=output, seed=seed))
            statuses = await trainer.run(finetuning.num_epochs)
            _summarise(output, name)
            return statuses


def _scoring_of_validations(config: Config) -> Any:
    """The sections that the rewards of validations depend on."""
    reward = config.finetuning.validation.reward or config.finetuning.reward_function
    evaluators = {name: config.eval.evaluators[name].model_dump() for name in reward.weights or [str(reward.name)]}
    return [reward.model_dump(), evaluators]


def _make_trainer(shared: Run) -> Trainer:
    """The trainer with the other two parts.

    Raises:
        WrongInput: the code of a part cannot be loaded.
    """
    config = shared.config
    try:
        make_builder = components.load("trajectory_builder", config.builder.type)
        make_adapter = components.load("trainer_adapter", config.adapter.type)
        make_trainer = components.load("trainer", config.trainer.type)
    except ValueError as error:
        raise WrongInput([str(error)]) from error
    builder, adapter = make_builder(config.builder, shared), make_adapter(config.adapter, shared)
    return make_trainer(config.trainer, shared, builder, adapter)


def _summarise(output: folder.Folder, name: str) -> None:
    epochs = output.state.epochs
    if not epochs:  # a trainer of one's own may write none
        return
    first, last = epochs[0].avg_reward, epochs[-1].avg_reward
    if first is None or last is None:
        raise FinetuneError("no trajectories: each rollout failed; training_metrics.jsonl has the reasons")
    if not any(epoch.filtered_groups for epoch in epochs):
        raise NoSignal(
            "in no epoch were there trajectories to train on: the rewards of each group were equal, or differed by less than "
            "curriculum_learning.min_reward_diff. Lower it, raise num_generations, or use rows that the model neither always "
            "solves nor always fails"
        )
    say(f"{name}: reward {first:.4f} in epoch 1, {last:.4f} in epoch {len(epochs)}; {output.path}")
    if last <= first and len(epochs) > 1:
        share = sum(epoch.num_without_signal for epoch in epochs) / sum(epoch.num_groups for epoch in epochs)
        say(
            f"rewards did not rise. {share:.0%} of the groups had equal rewards, which train nothing. Raise num_generations, try "
            "curriculum_learning or another learning_rate, and check that good answers get more than bad ones"
        )


async def check(file: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> None:
    """Rolls out and scores the first row, and prints what would be trained. Trains nothing, and leaves the folder alone.

    Raises:
        FinetuneError: as `run` does.
    """
    checked_file = prepare(file, overrides)
    async with connected(checked_file) as connection:
        session, seed = f"check-{uuid.uuid4().hex[:8]}", checked_file.config.finetuning.seed or 0
        trajectory, output = await connection.agent.play(connection.model, checked_file.rows[0], session, seed)
        print(_describe(trajectory, output))


def _describe(trajectory: art.Trajectory, output: Any) -> str:
    """A rollout as text: conversations, output and reward. ">" marks the answers that would be trained."""
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
