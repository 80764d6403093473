"""Loads what a checked file names: the user's code, which is imported, and the rows of the data sets. All problems come at once."""

import os
import random
from typing import Any

import art
from art.finetune import components
from art.finetune.batches import Batches
from art.finetune.checking import EVALUATORS
from art.finetune.components import Kind
from art.finetune.errors import WrongInput
from art.finetune.interfaces import CheckedFile, Code, Loaded, say
from art.finetune.reading import KeyPath, Problem, dotted
from art.finetune.rows import DatasetRow, hold_out, load_rows
from art.finetune.scoring import check_judge, rows_that_cannot_be_judged
from art.finetune.sections import Component, Config, DatasetSection, RewardFunction
from art.finetune.workflows import openai_variables, set_variables

TRAINING: KeyPath = ("eval", "general", "dataset")
VALIDATION: KeyPath = ("finetuning", "validation", "dataset")


def load(checked_file: CheckedFile, backend: art.Backend) -> Loaded:
    """The code and the rows of a file. Sets the variables in which an agent finds its model, which modules may read at their import.

    Raises:
        WrongInput: all problems of the code and of the data sets.
    """
    config, section = checked_file.config, checked_file.config.adapter.backend
    if components.is_code("workflow", config.workflow.type):
        key = (section.own_key or os.environ.get("ART_API_KEY") or "default").strip()
        name = f"{section.project}/{section.name}"
        set_variables(openai_variables(f"{backend.base_url}/v1", key, name))
    if config.finetuning.seed is not None:
        random.seed(config.finetuning.seed)  # for modules and workflows that draw from `random`
    problems: list[Problem] = []
    code = _load_code(checked_file, problems)
    rows, validation_rows = _load_rows(checked_file, code, problems)
    problems += _wrong_judges(checked_file)
    problems += _lost_messages(checked_file, code, [*rows, *validation_rows])
    if problems:
        raise WrongInput([str(problem) for problem in problems])
    return Loaded(
        **vars(checked_file),
        backend=backend,
        code=code,
        rows=rows,
        validation_rows=validation_rows,
        train_config=_train_config(config, len(rows)),
    )


def _train_config(config: Config, num_rows: int) -> art.TrainConfig:
    """The configuration of each train call. A cosine without `schedule_steps` ends with the run.
    (`runs` adds where the schedule begins, which a server knows.)"""
    training, finetuning = config.adapter.training, config.finetuning
    fields = training.model_dump(include=set(art.TrainConfig.model_fields), exclude_unset=True)
    if config.builder.num_generations == 1 and not {"baseline", "scaling", "preset"} & fields.keys():
        say(
            "num_generations is 1: rewards are standardised over the whole batch. Two or more compare rollouts of one row"
        )
        fields |= {"baseline": "none", "scaling": "batch_std"}
    if training.schedule == "cosine" and training.schedule_steps is None:
        batches = Batches(num_rows, finetuning.rows_per_step)
        num_jobs = finetuning.num_epochs * batches.per_epoch
        num_groups = min(num_rows, finetuning.rows_per_step or num_rows)
        fields["schedule_steps"] = num_jobs * training.num_optimizer_steps(num_groups)
    return art.TrainConfig.model_validate(fields)


def _load_code(checked_file: CheckedFile, problems: list[Problem]) -> Code:
    config, finetuning = checked_file.config, checked_file.config.finetuning

    def load_one(kind: Kind, component: Component, *path: str) -> Any:  # Any: the user's code, or None
        try:
            return components.load(kind, component.type) if components.is_code(kind, component.type) else None
        except ValueError as error:
            problems.append(checked_file.document.problem((*path, "_type"), str(error)))

    builder, adapter = finetuning.trajectory_builder, finetuning.trainer_adapter
    return Code(
        workflow=load_one("workflow", config.workflow, "workflow"),
        evaluators={
            name: load_one("evaluator", config.eval.evaluators[name], "eval", "evaluators", name)
            for name in dict.fromkeys(name for reward in finetuning.rewards for name in reward.names)
        },
        trajectory_builder=load_one("trajectory_builder", config.builder, "trajectory_builders", builder),
        trainer_adapter=load_one("trainer_adapter", config.adapter, "trainer_adapters", adapter),
        trainer=load_one("trainer", config.trainer, "trainers", finetuning.trainer),
    )


def _load_rows(
    checked_file: CheckedFile, code: Code, problems: list[Problem]
) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """The rows of training, and the rows of validations, which may be none."""
    config, validation = checked_file.config, checked_file.config.finetuning.validation
    training, dataset, reward = config.eval.general.dataset, validation.dataset, config.finetuning.reward_function

    parameter = None if code.workflow is None else components.question_parameter(code.workflow)

    def rows_of(path: KeyPath, section: DatasetSection, rewards: list[RewardFunction]) -> list[DatasetRow]:
        try:
            loaded = load_rows(section, dotted(path), parameter)
        except WrongInput as error:
            problems.extend(checked_file.document.problem(path, text) for text in error.problems)
            return []
        if loaded.left_out:
            say(f"{dotted(path)}: {loaded.left_out} rows without a question are left out")
        name = section.file_path or section.function
        if loaded.read_as:
            say(f"{name}: {loaded.read_as}")
        for judging in rewards:
            texts = rows_that_cannot_be_judged(config, judging, loaded.rows, section.structure.answer_key)
            problems.extend(checked_file.document.problem(path, f"{name}: {text}") for text in texts)
        return loaded.rows

    if validation.share is not None:
        rows = rows_of(TRAINING, training, config.finetuning.rewards)
        if not rows:
            return [], []
        try:
            trained, held_out = hold_out(rows, validation.share, config.finetuning.seed)
        except ValueError as error:
            problems.append(checked_file.document.problem(("finetuning", "validation", "share"), str(error)))
            return rows, []
        say(f"{len(held_out)} of {len(rows)} rows are held out for validations")
        _tell_equal(trained, held_out)
        return trained, held_out
    if dataset is None:  # `art eval` then evaluates the training rows
        return rows_of(TRAINING, training, config.finetuning.rewards), []
    same = {"id_key", "structure", "filter"} - dataset.model_fields_set
    dataset = dataset.model_copy(update={name: getattr(training, name) for name in same})
    rows, held_out = rows_of(TRAINING, training, [reward]), rows_of(VALIDATION, dataset, [validation.reward or reward])
    _tell_equal(rows, held_out)
    return rows, held_out


def _tell_equal(rows: list[DatasetRow], held_out: list[DatasetRow]) -> None:
    """Prints how many held-out rows are trained too: rows with the same question, messages and answer."""
    trained = {repr((row.question, row.messages, row.answer)) for row in rows}
    num_equal = sum(repr((row.question, row.messages, row.answer)) in trained for row in held_out)
    if num_equal:
        say(
            f"{num_equal} of {len(held_out)} held-out rows are equal to rows of training, so validations show too much: remove "
            "one of each two"
        )


def _wrong_judges(checked_file: CheckedFile) -> list[Problem]:
    """The problems of judges that cannot be asked."""
    evaluators, problems = checked_file.config.eval.evaluators, list[Problem]()
    for name in dict.fromkeys(name for reward in checked_file.config.finetuning.rewards for name in reward.names):
        if evaluators[name].type in ("judge", "ruler"):
            try:
                check_judge(evaluators[name].fields())
            except ValueError as error:
                problems.append(checked_file.document.problem((*EVALUATORS, name), str(error)))
    return problems


def _lost_messages(checked_file: CheckedFile, code: Code, rows: list[DatasetRow]) -> list[Problem]:
    """The problem of chat rows with several messages whose workflow would see only the last question."""
    kind, function = checked_file.config.workflow.type, code.workflow
    long = next((row for row in rows if len(row.messages) > 1), None)
    sees_all = kind == "command" or (
        function is not None and {"messages", "row"} & components.names_of_parameters(function)
    )
    if long is None or sees_all:
        return []
    remedy = "give it a parameter `messages`" if function is not None else "name a function with a parameter `messages`"
    text = f"{long.location} has {len(long.messages)} messages, and {kind} gets only the last question: {remedy}"
    return [checked_file.document.problem(("workflow", "_type"), text)]
