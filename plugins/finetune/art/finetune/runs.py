"""Runs: from a file to the loop over the epochs, which is `training.ArtTrainer.run`.

await art.finetune.run("finetune.yml", {"finetuning.num_epochs": 3})
"""

import contextlib
import os
import re
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import art
from art.contained import contained
from art.finetune import checking, components, folder, loading, other_harnesses, reading, stopping, toolkit
from art.finetune.agent import Agent, Played, line_of_failure, num_answers, num_cut_answers, reason_of, text_of
from art.finetune.errors import FinetuneError, NoServer, NoSignal, RolloutFailed, WrongInput
from art.finetune.interfaces import CheckedFile, Code, Connected, Loaded, Run, Trainer, TrainingJobStatus, say
from art.finetune.losing import is_lost, server_lost
from art.finetune.rows import digest
from art.finetune.run_record import EpochRow, State, solved_reward
from art.finetune.scoring import Evaluator, Reward, evaluator_of
from art.finetune.sections import Config, RewardFunction
from art.finetune.workflows import of_command, of_function, unused_llm_fields
from art_protocol.running_server import running_address

Unknown = Literal["create", "refuse", "delete"]
"""What happens to a model that the server does not know: a new model is created, or refused, or, with a name of `temporary_name`,
created and deleted at the end."""
TEMPORARY = re.compile(r"base-(\d{10})-[0-9a-f]{8}")
TEMPORARY_SECONDS = 86400.0
"""No evaluation lasts this long: an older temporary model is of an evaluation that was killed."""
MAX_NAMED = 10
"""The models that a message names."""
NEARLY_ALL = 0.9
"""If more than this share of the rollouts end with the same answer, and rewards fell, the model has collapsed."""
LOW_RATE = ", the default: docs/howto/hyperparameters.md begins with 1e-4 for models from 0.5B on, and with 5e-4 to 1e-3 for smaller ones"
Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


def checked(file: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> CheckedFile:
    """Reads and checks a file.

    Raises:
        WrongInput: all problems of the file.
    """
    pairs = pairs_of(overrides)
    document = reading.of_dict(file, pairs) if isinstance(file, Mapping) else reading.read(Path(file), pairs)
    config = checking.check(document, toolkit.find())
    return CheckedFile(document, config, checking.policy_llm(document.tree))


def pairs_of(overrides: Overrides) -> list[tuple[str, Any]]:
    return list(overrides.items() if isinstance(overrides, Mapping) else overrides)


def prepare(file: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> CheckedFile:
    """Reads and checks a file, and prints the fields without effect.

    Raises:
        WrongInput: all problems of the file.
    """
    checked_file = checked(file, overrides)
    if ignored := checking.without_effect(checked_file.config):
        say(f"without effect here: {', '.join(map(other_harnesses.with_remedy, ignored))}")
    return checked_file


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncGenerator[art.Backend]:
    """The backend of the file's server. If neither the file nor ART_SERVER_URL names one: the server that runs in `.art`, or else
    a server that is started.

    Raises:
        NoServer: no server can be started.
    """
    async with contextlib.AsyncExitStack() as opened:
        try:
            backend = await opened.enter_async_context(_backend(config))
        except art.ArtError as error:
            raise NoServer(str(error)) from error
        yield backend


@contextlib.asynccontextmanager
async def loaded(checked_file: CheckedFile) -> AsyncGenerator[Loaded]:
    """The code and the rows of a file. Starts a server if the file names none, because an agent finds its model in variables while
    its module is imported. No server gets a request.

    Raises:
        WrongInput: all problems of the code and of the data sets.
        NoServer: no server can be started.
    """
    async with serving(checked_file.config) as backend:
        yield loading.load(checked_file, backend)


@contextlib.asynccontextmanager
async def validation_reward(checked_file: CheckedFile) -> AsyncGenerator[Reward]:
    """The reward of validations. Only evaluators of NVIDIA's toolkit, which are built with the model, need a server.

    Raises:
        WrongInput, NoServer, FinetuneError: as `loaded` and `connected`.
    """
    config = checked_file.config
    reward = config.finetuning.validation.reward or config.finetuning.reward_function
    if any(components.is_of_toolkit("evaluator", config.eval.evaluators[name].type) for name in reward.names):
        async with loaded(checked_file) as loaded_file, connected(loaded_file, unknown="refuse") as connection:
            yield connection.validation_agent.reward
    else:
        async with art.Backend(_address(config)) as backend:  # gets no request
            yield Reward(config, reward, _functions(loading.load(checked_file, backend).code))


@contextlib.asynccontextmanager
async def connected(loaded_file: Loaded, *, unknown: Unknown = "create") -> AsyncGenerator[Connected]:
    """Registers the model, and builds workflow and rewards. `unknown` is what happens to a model that the server does not know.

    Raises:
        WrongInput: NVIDIA's toolkit refuses a section, or the server does not know the model.
        NoServer: no server answers, or the server was lost in the block.
        FinetuneError: the server refuses the model, or the block raised any other error.
    """
    config, policy, finetuning = loaded_file.config, loaded_file.policy, loaded_file.config.finetuning
    model = await _register(config, loaded_file.backend, unknown)
    if unknown == "create":
        await _check_learning(model)
    async with contextlib.AsyncExitStack() as opened:
        if unknown == "delete":
            opened.push_async_callback(_delete, model)
        try:
            workflow, evaluators = await opened.enter_async_context(toolkit.building(config, policy, model))
        except ValueError as error:
            raise WrongInput([str(error)]) from error
        if workflow is None:
            user_function = loaded_file.code.workflow
            workflow = of_function(user_function) if user_function else of_command(config.workflow.fields()["command"])
            if unused := unused_llm_fields(user_function, config.llms, policy):
                say(
                    f"without effect here: {', '.join(unused)}: the workflow asks OPENAI_MODEL with its own parameters; a "
                    "function with a parameter `llms` gets them"
                )
        evaluators |= _functions(loaded_file.code)
        agent = Agent(
            workflow=workflow,
            reward=Reward(config, finetuning.reward_function, evaluators),
            llms=config.llms,
            policy=policy,
            targets=frozenset(finetuning.target_functions),
            timeout_seconds=config.eval.general.rollout_timeout_seconds,
            is_seeded=finetuning.seed is not None,
            sampling=config.llms[policy].sampling if policy is not None else {},
        )
        validation_agent = agent
        if finetuning.validation.reward is not None:
            validation_agent = replace(agent, reward=Reward(config, finetuning.validation.reward, evaluators))
        try:
            with contained("a part of the run"):
                yield Connected(**vars(loaded_file), model=model, agent=agent, validation_agent=validation_agent)
        except FinetuneError:
            raise
        except Exception as error:  # the first failure of a rollout, which gather raises
            if isinstance(error, art.ArtConnectionError) or await is_lost(model):
                raise server_lost(model, error) from error
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
            raise FinetuneError(f"rollouts failed: {reason_of(error)}{notes}{line_of_failure(error)}") from error


def _functions(code: Code) -> dict[str, Evaluator]:
    """The evaluators that are functions of the user, by name."""
    return {name: evaluator_of(function) for name, function in code.evaluators.items() if function is not None}


async def _register(config: Config, backend: art.Backend, unknown: Unknown = "create") -> art.TrainableModel:
    """The file's model, which the server knows.

    Raises:
        WrongInput: the server does not know the model, and a new one is refused.
        NoServer: no server answers, or no server can be started.
        FinetuneError: the server refuses the model.
    """
    section = config.adapter.backend
    fields = section.model_dump(include={"name", "project", "base_model"})
    engine_args = section.engine_args.model_dump(exclude_none=True) if section.engine_args is not None else {}
    if section.init_args is not None and section.init_args.max_seq_length is not None:
        engine_args["max_seq_length"] = section.init_args.max_seq_length
    model = art.TrainableModel(**fields, lora=section.lora and section.lora.to_model(), engine_args=engine_args)
    try:
        known = [] if unknown == "create" else await backend._list_models()  # pyright: ignore[reportPrivateUsage]
        if unknown == "refuse" and model.get_inference_name() not in known:
            raise WrongInput([_no_model(config, known)])
        if unknown == "delete":
            await _delete_left_over(model, backend, known)
        await model.register(backend)
    except art.ArtConnectionError as error:
        is_in_file = _address(config) is not None or not os.environ.get("ART_SERVER_URL")
        where = "the adapter's backend" if is_in_file else "ART_SERVER_URL"
        raise NoServer(
            f"Failed to connect to ART backend: {error}. Start `art-server`, or check the address in {where}: `curl {backend.base_url}/health` shows whether it answers"
        ) from error
    except art.ArtStatusError as error:
        remedy = ""
        if error.code == "lora_differs":
            adapter = f"trainer_adapters.{config.finetuning.trainer_adapter}"
            remedy = f". Set another {adapter}.backend.name, or leave {adapter}.backend.lora out"
        if error.status == 403:
            adapter = f"trainer_adapters.{config.finetuning.trainer_adapter}"
            remedy = f". Name a project of the key: -o {adapter}.backend.project PROJECT"
        raise FinetuneError(f"the server refuses the model: {error}{remedy}") from error
    except art.ArtError as error:  # a server that this program starts has failed
        raise NoServer(str(error)) from error
    return model


async def _check_learning(model: art.TrainableModel) -> None:
    """Checks that a program may train the model, before rollouts are sampled for nothing.

    Raises:
        FinetuneError: the server trains the model, from scores.
    """
    with contextlib.suppress(art.ArtStatusError):  # an older server has no such route
        if (await model.learning()).state == "on":
            name = model.get_inference_name()
            raise FinetuneError(
                f"{name} learns from scores, and its steps are the server's: pause that first (`art learn {name} --pause`), or "
                "train another model"
            )


def _no_model(config: Config, known: Sequence[str]) -> str:
    name = f"{config.adapter.backend.project}/{config.adapter.backend.name}"
    shown = ", ".join(sorted(known)[:MAX_NAMED]) + (
        f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    )
    return (
        f"no model {name}; known: {shown or 'none'}. `art finetune` makes the file's model, and `art eval --step base` evaluates "
        "the base model"
    )


async def _is_new(config: Config, backend: art.Backend) -> bool:
    """Whether the server does not know the file's model. False if no server answers, which `connected` reports."""
    section = config.adapter.backend
    try:
        return f"{section.project}/{section.name}" not in await backend._list_models()  # pyright: ignore[reportPrivateUsage]
    except art.ArtError:
        return False


def temporary_name() -> str:
    """A name for the model of one evaluation of the base model, or of one check of a new model. The name has the time, in seconds since 1970."""
    return f"base-{time.time():.0f}-{uuid.uuid4().hex[:8]}"


async def _delete(model: art.TrainableModel) -> None:
    """Deletes the model of an evaluation of the base model, unless another program has trained it since."""
    try:
        if not await model.get_step():
            await model.delete()
    except art.ArtError as error:
        say(f"{model.get_inference_name()}, which was made for this command, stays on the server: {error}")


async def _delete_left_over(model: art.TrainableModel, backend: art.Backend, known: Sequence[str]) -> None:
    """Deletes the temporary models of the model's project that killed evaluations have left."""
    for path in known:
        project, _, name = path.partition("/")
        match = TEMPORARY.fullmatch(name)
        if project == model.project and match and time.time() - int(match[1]) > TEMPORARY_SECONDS:
            left_over = art.TrainableModel(name=name, project=project, base_model=model.base_model)
            with contextlib.suppress(art.ArtStatusError):  # another evaluation has deleted it
                if not await backend._get_step(left_over):  # pyright: ignore[reportPrivateUsage]
                    await backend._delete(left_over)  # pyright: ignore[reportPrivateUsage]


def _address(config: Config) -> str | None:
    """The server's address in the file."""
    section = config.adapter.backend
    if section.ip is None:
        return section.url
    host = "127.0.0.1" if section.ip == "0.0.0.0" else section.ip
    return f"http://{host}:{section.port or 7623}"


def _backend(config: Config) -> art.Backend:
    return backend_at(_address(config), config.adapter.backend.own_key, config.finetuning.trackers)


def backend_at(url: str | None, key: str | None = None, trackers: Sequence[str] = ()) -> art.Backend:
    """The backend of a server. Without an address: that of ART_SERVER_URL, or the server that runs in `.art`, or else a server that is
    started."""
    if url is None and not os.environ.get("ART_SERVER_URL"):
        url = running_address(Path(".art"))
        if url is None:
            return art.LocalBackend(trackers=trackers)
        say(f"the server that runs in .art is used: {url}")
    return art.Backend(url, key, trackers=trackers)


async def run(
    file: str | Path | Mapping[str, Any], overrides: Overrides = (), *, fresh: bool = False
) -> list[TrainingJobStatus]:
    """Trains the run of a file, or continues the run in the output folder. Returns how each epoch, or with
    `rows_per_step` each step, of this call ended. `fresh` begins a run from the base model, and renames the output folder.

    `overrides` are values by dotted name. An override wins over the file.

    Raises:
        WrongInput: the file, a data set or an override is wrong, the folder has another run, or `fresh` names a trained model.
        NoServer: no server answers.
        NoSignal: in no epoch did rewards differ.
        FinetuneError: rollouts or training failed.
    """
    checked_file = prepare(file, overrides)
    config, finetuning = checked_file.config, checked_file.config.finetuning
    dumped = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    async with loaded(checked_file) as loaded_file:
        if fresh:
            await _check_fresh(config, loaded_file.backend)
        with folder.opened(finetuning.output_dir, dumped, **_digests(loaded_file), fresh=fresh) as output:
            if output.has_new_workflow:
                say(f"the code of {config.workflow.type} has changed: the run continues with the new code")
            if len(output.state.epochs) >= finetuning.num_epochs * loaded_file.batches.per_epoch:
                say(f"{output.path}: all {finetuning.num_epochs} epochs are trained already")
                if rolled_back := await _rolled_back(loaded_file, output.state):
                    say(rolled_back)
                return []
            async with connected(loaded_file) as connection:
                name = connection.model.get_inference_name()
                is_new = not output.state.epochs and output.state.step is None
                if is_new and (step := await connection.model.get_step()):
                    say(f"{name} exists: it is trained further from step {step}; {_from_the_base(config)}")
                    output.save(schedule_begins=await _num_optimizer_steps(connection.model))
                seed = output.state.seed if finetuning.seed is None else finetuning.seed
                run, code = Run(**vars(connection), folder=output, seed=seed), connection.code
                run = replace(run, train_config=_of_run(run.train_config, output.state))
                builder, adapter = (
                    code.trajectory_builder(config.builder, run),
                    code.trainer_adapter(config.adapter, run),
                )
                say(
                    f"learning rate {_rate_of(run.train_config)}{'' if _has_rate(run.train_config) else ' (the default)'}"
                )
                trainer: Trainer = code.trainer(config.trainer, run, builder, adapter)
                statuses = await trainer.run(finetuning.num_epochs)
                _summarise(run)
                best = await stopping.best_step(run.model, output.state.validations)
                if ends := [end for end in (stopping.fall(output.state), best) if end]:
                    say("; ".join(ends))
                return statuses


async def _rolled_back(loaded_file: Loaded, state: State) -> str | None:
    """How a finished run continues whose model was rolled back since, in words; None if it was not, or if no server answers."""
    try:
        model = await _register(loaded_file.config, loaded_file.backend, "refuse")
        step = await model.get_step()
    except (FinetuneError, art.ArtError):
        return None
    if not state.epochs or step >= state.epochs[-1].step:
        return None
    num_epochs = loaded_file.config.finetuning.num_epochs
    return f"the model is at step {step} since a rollback; --num_epochs {num_epochs + 1} trains further from there"


async def _num_optimizer_steps(model: art.TrainableModel) -> int:
    """The optimizer steps of the newest checkpoint; 0 for the checkpoint of another program."""
    return (await model.checkpoints())[-1].optimizer_steps or 0


def _of_run(config: art.TrainConfig, state: State) -> art.TrainConfig:
    """The configuration with warm-up and schedule from the run's beginning, unless the file says where they begin."""
    if not state.schedule_begins or "schedule_begins" in config.model_fields_set:
        return config
    return config.model_copy(update={"schedule_begins": state.schedule_begins})


async def _check_fresh(config: Config, backend: art.Backend) -> None:
    """Checks that a fresh run begins from the base model.

    Raises:
        WrongInput: the model was trained already.
    """
    model = await _register(config, backend)
    if step := await model.get_step():
        name = model.get_inference_name()
        raise WrongInput(
            [f"--fresh begins from the base model, and {name} is at step {step}: {_from_the_base(config)}"]
        )


def _from_the_base(config: Config) -> str:
    """How a run begins from the base model, in words."""
    adapter, name = config.finetuning.trainer_adapter, config.adapter.backend.name
    return f"to begin from the base model, set another trainer_adapters.{adapter}.backend.name (without a file: --name {name}-2)"


def _digests(loaded_file: Loaded) -> dict[str, Any]:
    """The digests of what a run is trained and validated on, as fields of `Asked`."""
    evaluators, finetuning, code = loaded_file.config.eval.evaluators, loaded_file.config.finetuning, loaded_file.code

    def sources_of(reward: RewardFunction) -> dict[str, str]:
        functions = {evaluators[name].type: code.evaluators[name] for name in reward.names}
        sources = {kind: components.source_of(function) for kind, function in functions.items() if function is not None}
        return {kind: digest([], source) for kind, source in sources.items() if source}

    reward = finetuning.validation.reward or finetuning.reward_function
    sections = {name: evaluators[name].model_dump() for name in reward.names}
    source = "" if code.workflow is None else components.source_of(code.workflow)
    return {
        "rows": digest(loaded_file.rows),
        "validation": digest(loaded_file.validation_rows, reward.model_dump(), sections, sources_of(reward)),
        "workflow": digest([], source) if source else "",
        "rewards": sources_of(finetuning.reward_function),
    }


def _summarise(run: Run) -> None:
    epochs, name = run.folder.state.epochs, run.model.get_inference_name()
    if not epochs:  # a trainer of one's own may write none
        return
    first, last = epochs[0].avg_reward, epochs[-1].avg_reward
    if first is None or last is None:
        raise FinetuneError("no trajectories: each rollout failed; training_metrics.jsonl has the reasons")
    solved = solved_reward(epochs)
    if not any(epoch.filtered_groups for epoch in epochs):
        if solved is not None:
            raise NoSignal(
                f"nothing was trained, because all rewards are {solved:g}: the model seems to solve these rows already"
            )
        raise NoSignal(
            "in no epoch were there trajectories to train on: the rewards of each group were equal, or differed by less than "
            "curriculum_learning.min_reward_diff. Lower it, raise num_generations, or use rows that the model neither always "
            "solves nor always fails"
        )
    titles, per_epoch = [run.batches.title(0), run.batches.title(len(epochs) - 1)], run.batches.per_epoch
    num_whole = len(epochs) // per_epoch
    is_of_same_rows = per_epoch == 1 or num_whole > 1
    if is_of_same_rows:  # batches of an epoch have different rows, and whole epochs have the same
        last_whole = epochs[(num_whole - 1) * per_epoch : num_whole * per_epoch]
        first, last = _mean_reward(epochs[:per_epoch]), _mean_reward(last_whole)
        titles = ["epoch 1", f"epoch {num_whole}"]
    say(f"{name}: reward {first:.4f} in {titles[0]}, {last:.4f} in {titles[1]}; {run.folder.path}")
    if len(epochs) == 1 or solved is not None:
        return
    validations = run.folder.state.validations_of_trained
    newest = (validations[-1].share_same if validations else None) or epochs[-1].share_same
    rate = _rate_of(run.train_config)
    if newest > NEARLY_ALL and (last < first or stopping.fall(run.folder.state)):
        say(f"all answers are the same now: lower the learning rate, which was {rate}")
    elif is_of_same_rows and last <= first:
        if not _has_rate(run.train_config):
            rate += LOW_RATE
        share = sum(epoch.num_without_signal for epoch in epochs) / sum(epoch.num_groups for epoch in epochs)
        say(
            f"rewards did not rise. {share:.0%} of the groups had equal rewards, which train nothing. Raise num_generations, try "
            f"curriculum_learning or another learning_rate than {rate}, and check that good answers get more than bad ones"
        )


def _mean_reward(epochs: Sequence[EpochRow]) -> float:
    """The mean reward of all rollouts of some batches."""
    num_rollouts = sum(row.num_trajectories for row in epochs)
    return sum((row.avg_reward or 0.0) * row.num_trajectories for row in epochs) / num_rollouts


def _has_rate(config: art.TrainConfig) -> bool:
    """Whether the file or a flag sets the learning rate."""
    return "learning_rate" in config.model_fields_set


def _rate_of(config: art.TrainConfig) -> str:
    rate = config.learning_rate
    return f"{rate:g}".replace("e-0", "e-") if isinstance(rate, float) else str(rate)


async def check(file: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> None:
    """Rolls out and scores the first row, and prints what would be trained. Trains nothing, and leaves the folder alone. A model
    that the server does not know is made under a temporary name, and deleted at the end.

    Raises:
        FinetuneError: as `run` does.
    """
    checked_file = prepare(file, overrides)
    async with contextlib.AsyncExitStack() as opened:
        backend = await opened.enter_async_context(serving(checked_file.config))
        is_new = await _is_new(checked_file.config, backend)
        if is_new:  # the agent's module may read the name at its import
            name = f"trainer_adapters.{checked_file.config.finetuning.trainer_adapter}.backend.name"
            checked_file = checked(file, [*pairs_of(overrides), (name, temporary_name())])
        loaded_file = loading.load(checked_file, backend)
        unknown: Unknown = "delete" if is_new else "create"
        connection = await opened.enter_async_context(connected(loaded_file, unknown=unknown))
        session, seed = f"check-{uuid.uuid4().hex[:8]}", connection.config.finetuning.seed or 0
        row = connection.rows[0]
        try:
            played = await connection.agent.play_with_reasons(connection.model, row, session, seed)
        except RolloutFailed as error:
            say(text_of(error))
            raise
        print(_describe(played, connection.agent.reward.judge_prompts(row, played.output)))


def _describe(played: Played, judge_prompts: Mapping[str, str]) -> str:
    """A rollout as text: conversations, output, prompts of judges, and reward. ">" marks the answers that would be trained."""
    trajectory, output, reasons = played
    lines: list[str] = []
    for number, history in enumerate([trajectory, *trajectory.additional_histories], 1):
        if number > 1:
            lines.append(f"--- conversation {number}")
        messages: list[Any] = history.messages()
        for entry, message in zip(history.messages_and_choices, messages, strict=True):
            mark = " " if isinstance(entry, dict) else ">"
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [f"{function['name']}({function['arguments']})" for function in functions]
            lines.append(f"{mark} {message['role']}: {' '.join([message.get('content') or '', *calls])}")
    lines.append(f"output: {output}")
    lines += [f"--- prompt of judge {name}\n{prompt}\n---" for name, prompt in judge_prompts.items()]
    lines.append(f"reward: {trajectory.reward:g}")
    lines += [f"reason of {name}: {reason}" for name, reason in reasons.items()]
    lines += [f"{name}: {value:g}" for name, value in trajectory.metrics.items()]
    count = num_answers(trajectory)
    lines.append(f"{count} {'answer' if count == 1 else 'answers'} would be trained")
    if num_cut := num_cut_answers(trajectory):
        lines.append(
            f"the token limit cut {num_cut} of {count} answers: raise max_tokens of the agent's requests, or the server's "
            "--max-seq-length, or ask for shorter answers"
        )
    return "\n".join([*lines, *trajectory.logs])
