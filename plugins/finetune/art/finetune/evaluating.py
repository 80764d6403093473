"""`art eval`: the validation rows at a step, the difference from another step or from earlier results, and how often the reward
agrees with labels."""

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

import art
from art.evaluation import log_evaluation
from art.files import write_whole
from art.finetune.agreement import Agreement, agreement, label_of
from art.finetune.differences import Comparison, write_page
from art.finetune.differences import compare as compare_results
from art.finetune.errors import FinetuneError, WrongInput
from art.finetune.folder import CONFIG_FILE, STATE_FILE, state_in
from art.finetune.interfaces import Loaded, say
from art.finetune.losing import server_lost
from art.finetune.masking import without_secrets
from art.finetune.reading import dataset_of_text
from art.finetune.results import Recorder, ResultRecord, read_results, write_results
from art.finetune.rows import digest, load_rows, select
from art.finetune.run_record import to_json
from art.finetune.runs import (
    Overrides,
    checked,
    connected,
    loaded,
    pairs_of,
    prepare,
    temporary_name,
    validation_reward,
)
from art.finetune.scoring import rows_that_cannot_be_judged
from art.finetune.sections import Config, DatasetSection
from art.pool import num_tolerated


class Names(NamedTuple):
    """The files of an evaluation in the output folder."""

    figures: str
    results: str
    page: str


ALL_ROWS = Names("eval.json", "eval_results.jsonl", "eval.html")
CHOSEN_ROWS = Names("eval_chosen.json", "eval_chosen_results.jsonl", "eval_chosen.html")
"""With `ids` or `limit`: the files of all rows stay as they are."""
AGREEMENT_FILE = "agreement.jsonl"
COMPARED = (
    "workflow",
    "llms",
    "eval.evaluators",
    "eval.general.dataset",
    "finetuning.reward_function",
    "finetuning.validation",
    "finetuning.target_functions",
)
"""The sections of a file that decide what an evaluation's mean is about. An evaluation with others is not in the history, where a
later mean replaces an earlier one."""


@dataclass(frozen=True, slots=True, repr=False)
class FileEvaluation(art.Evaluation):
    """The result of `art eval`: an evaluation with its rollouts, and its comparison if it has a baseline or earlier results."""

    records: list[ResultRecord] = field(default_factory=list[ResultRecord], compare=False)
    """The rollouts, those of the baseline last."""
    comparison: Comparison | None = None
    page: Path | None = None
    """The page of the comparison."""


async def evaluate(
    file: str | Path | Mapping[str, Any],
    overrides: Overrides = (),
    *,
    step: str | None = None,
    baseline: str | None = None,
    reps: int | None = None,
    limit: int | None = None,
    ids: Sequence[str] = (),
    results: str | Path | None = None,
    compare: str | Path | None = None,
) -> FileEvaluation:
    """The mean reward of a step on the file's validation rows, or on the training rows if the file has no validation rows. With
    `baseline` also the paired difference from that step. `ids` and `limit` choose rows.

    A step is a number, "best", "base", or None for the newest step. The best step has the highest val/reward, or the highest
    train/reward without validations. `eval.json` in the output folder has the figures. If all rows of an unchanged file are
    evaluated, the history has eval/reward too. `eval_results.jsonl` (or `results`) has the rollouts of the step. With `baseline`,
    or with the results of an earlier evaluation (`compare`), the result has a `comparison`, and `eval.html` shows the differences.

    Raises:
        WrongInput: the file is wrong, or there is no such model, step or row.
        NoServer: no server answers.
        FinetuneError: too many rollouts failed.
    """
    if reps is not None and reps < 1:
        raise WrongInput([f"--reps must be at least 1, not {reps}"])
    checked_file = prepare(file, overrides)
    finetuning, folder = checked_file.config.finetuning, _folder(file, checked_file.config, overrides)
    is_of_base = step == "base" and baseline in (None, "base")
    if is_of_base:  # the model's name tells apart what two evaluations at the same time have sampled
        name = f"trainer_adapters.{finetuning.trainer_adapter}.backend.name"
        checked_file = checked(file, [*pairs_of(overrides), (name, temporary_name())])
    names = ALL_ROWS if limit is None and not ids else CHOSEN_ROWS
    page, comparison = folder / names.page, None
    earlier = None if compare is None else read_results(Path(compare))
    async with loaded(checked_file) as loaded_file:
        try:
            rows = select(loaded_file.validation_rows or loaded_file.rows, ids, limit)
        except ValueError as error:
            raise WrongInput([str(error)]) from error
        if not loaded_file.validation_rows:
            _say_rows(loaded_file, folder, has_file=not isinstance(file, Mapping))
        async with connected(loaded_file, unknown="delete" if is_of_base else "refuse") as connection:
            number, other = await _step(connection.model, step), await _step(connection.model, baseline)
            reasons = (["some rows only"] if ids or limit is not None else []) + _changed(
                file, overrides, checked_file.config, folder
            )
            if reasons and number != "base":
                say(f"not in the history, which has evaluations of all rows of an unchanged file: {', '.join(reasons)}")
            agent, session = connection.validation_agent, f"eval-{uuid.uuid4().hex[:12]}"
            recorder = Recorder(agent, session, finetuning.seed or 0, _dataset(checked_file.config))
            try:
                evaluation = await art.evaluate(
                    connection.model,
                    recorder.play,
                    rows,
                    step=number,
                    baseline=other,
                    reps=reps or finetuning.validation.reps,
                    log=False,  # an evaluation in which too many rollouts failed is not logged
                    seed=finetuning.seed,
                    max_exceptions=math.inf,  # all rows are finished; `_check_failures` counts
                    max_concurrent_rollouts=checked_file.config.eval.general.max_concurrency,
                )
            finally:  # an evaluation that failed has results too
                records = sorted(recorder.records, key=lambda record: _is_of(other, record))
                if records:
                    say(write_results(Path(results or folder / names.results), records, rows))
            if recorder.lost is not None:
                raise server_lost(connection.model, recorder.lost)
            _check_failures(records, finetuning.max_exceptions)
            if not reasons:
                await _log(connection.model, evaluation)
            if hint := connection.validation_agent.reward.take_hint([record.reward for record in records]):
                say(hint)
    _write_figures(folder / names.figures, evaluation)
    if earlier is None and baseline is not None:
        earlier = [record for record in records if _is_of(other, record)]
    if earlier is not None:
        if ids or limit is not None:
            chosen = {row.id for row in rows}
            earlier = [record for record in earlier if record.id in chosen]
        later = [record for record in records if record.model == evaluation.name]
        comparison = _write_differences(page, earlier, later)
    parts: dict[str, Any] = {part.name: getattr(evaluation, part.name) for part in fields(evaluation)}
    return FileEvaluation(**parts, records=records, comparison=comparison, page=page)


async def _log(model: art.TrainableModel, evaluation: art.Evaluation) -> None:
    """Writes an evaluation and its baseline to the history."""
    for part in (evaluation, evaluation.baseline):
        if part is not None and part.step is not None:
            # not "val": these rows can differ from the run's, whose val/reward decides the best step
            await log_evaluation(model, part, part.step, "eval")


def _check_failures(records: Sequence[ResultRecord], max_exceptions: float) -> None:
    """Prints how many rollouts failed, and why the first.

    Raises:
        FinetuneError: more rollouts failed than `max_exceptions` tolerates (`num_tolerated`).
    """
    failed = [record for record in records if record.error is not None]
    if not failed:
        return
    line = f"{len(failed)} of {len(records)} rollouts failed; row {failed[0].id!r}: {failed[0].error}"
    if len(failed) > num_tolerated(max_exceptions, len(records)):
        raise FinetuneError(f"{line}. finetuning.max_exceptions is {max_exceptions:g} (-o finetuning.max_exceptions N)")
    say(f"{line}. Failed rollouts are in no mean; -o finetuning.max_exceptions 0 lets none fail")


def _dataset(config: Config) -> str:
    """The evaluated data set: its file, its function or its name on the hub."""
    section = config.finetuning.validation.dataset or config.eval.general.dataset
    return str(section.file_path or section.function or section.name)


def _say_rows(loaded_file: Loaded, folder: Path, *, has_file: bool) -> None:
    """Prints which rows are evaluated where the file has no rows of validations, and whether the run in the folder trains them."""
    state = state_in(folder)
    is_trained = state is not None and bool(state.epochs) and state.rows == digest(loaded_file.rows)
    rows = "the rows of eval.general.dataset are evaluated"
    if is_trained:
        say(f"{rows}, and the run in {folder} was trained on them: they say nothing about other rows")
    elif has_file:
        say(rows)


def _changed(file: str | Path | Mapping[str, Any], overrides: Overrides, config: Config, folder: Path) -> list[str]:
    """The sections of `COMPARED` whose values overrides change. The flags of a function are compared with the run in the folder,
    because a function has no file."""
    try:
        unchanged = checked(file).config
    except WrongInput:  # a function, or a file that needs its overrides
        state = state_in(folder)
        if state is None:
            return [f"without its flags it is no whole file, and {folder} has no run to compare with"]
        unchanged = Config.model_validate(state.config)
    before, after = (without_secrets(version.model_dump(by_alias=True)) for version in (unchanged, config))
    return [section for section in COMPARED if _value(before, section) != _value(after, section)]


def _value(tree: Mapping[str, Any], section: str) -> Any:  # Any: a section, as plain values
    value: Any = tree
    for name in section.split("."):
        value = value[name]
    return value


def _folder(file: str | Path | Mapping[str, Any], config: Config, overrides: Overrides) -> Path:
    """The folder of the results: the output folder, or the folder of the run whose `config.yml` is evaluated, which may have
    another name than when the run began."""
    names = overrides if isinstance(overrides, Mapping) else [name for name, _ in overrides]
    if not isinstance(file, Mapping) and Path(file).name == CONFIG_FILE and "finetuning.output_dir" not in names:
        folder = Path(file).parent
        if (folder / STATE_FILE).exists():
            return folder
    return config.finetuning.output_dir


def _write_figures(path: Path, evaluation: art.Evaluation) -> None:
    figures = _figures(evaluation)
    if evaluation.baseline is not None and evaluation.difference is not None:
        figures["baseline"] = _figures(evaluation.baseline)
        figures["difference"] = asdict(evaluation.difference)
    write_whole(path, to_json(figures))


def _write_differences(page: Path, earlier: list[ResultRecord], later: list[ResultRecord]) -> Comparison:
    comparison = compare_results(earlier, later)
    write_page(page, comparison, earlier, later)
    return comparison


def page_of(results: str | Path) -> Path:
    """The page that `compare_files` writes beside the later results."""
    return Path(results).with_suffix(".html")


def compare_files(before: str | Path, after: str | Path) -> Comparison:
    """The differences between the results of two evaluations. Writes the page beside `after`, with the ending .html. No server is
    asked.

    Raises:
        WrongInput: a file has no results, or the two have no row in common.
    """
    return _write_differences(page_of(after), read_results(Path(before)), read_results(Path(after)))


async def measure_agreement(
    file: str | Path | Mapping[str, Any],
    labels: str | Path,
    overrides: Overrides = (),
    *,
    limit: int | None = None,
    ids: Sequence[str] = (),
) -> Agreement:
    """How often the reward of validations agrees with the labels of people. `labels` is a file of rows as `eval_results.jsonl` has
    them: question, answer and `output`, with a column `label`, a number from 0 to 1, or yes or no. `agreement.jsonl` in the output
    folder has the scores and the reasons.

    Raises:
        WrongInput: a file is wrong, or a row has no label.
        NoServer: no server answers, and an evaluator needs the server.
        FinetuneError: too many answers could not be scored.
    """
    checked_file = prepare(file, overrides)
    config = checked_file.config
    section = {"limit": limit, "ids": list(ids), **dataset_of_text(Path(labels))}
    try:
        rows = load_rows(DatasetSection.model_validate(section), apart_by=("model", "repetition")).rows
        for row in rows:
            label_of(row)
    except ValidationError as error:
        raise WrongInput([f"{labels}: a file of labels ends in .jsonl, .json, .csv or .parquet"]) from error
    except ValueError as error:
        raise WrongInput([f"{labels}: {error}"]) from error
    async with validation_reward(checked_file) as reward:
        judged = config.finetuning.validation.reward or config.finetuning.reward_function
        if problems := rows_that_cannot_be_judged(config, judged, rows, "answer"):
            raise WrongInput([f"{labels}: {problem}" for problem in problems])
        measured = await agreement(
            reward,
            rows,
            labels=str(labels),
            max_exceptions=config.finetuning.max_exceptions,
            max_concurrency=config.eval.general.max_concurrency,
        )
    say(write_results(_folder(file, config, overrides) / AGREEMENT_FILE, measured.records, rows))
    return measured


async def _step(model: art.TrainableModel, name: str | None) -> int | Literal["base"] | None:
    """The step that a flag names."""
    if name is None or name == "base":
        return name
    kept = await model.checkpoints()
    steps = {str(checkpoint.step): checkpoint.step for checkpoint in kept}
    steps["best"] = next((checkpoint.step for checkpoint in kept if checkpoint.is_best), await model.get_step())
    if name not in steps:
        raise WrongInput([f"no step {name}: there are {', '.join(steps)}, base"])
    return steps[name]


def _is_of(step: int | Literal["base"] | None, record: ResultRecord) -> bool:
    """Whether a rollout sampled from a step; never for None."""
    pinned = record.model.partition("@")[2] or "base"
    return step is not None and pinned == str(step)


def _figures(evaluation: art.Evaluation) -> dict[str, Any]:
    return {
        "name": evaluation.name,
        "step": evaluation.step,
        "reward": asdict(evaluation.reward),
        "row_rewards": evaluation.scenario_rewards,
        "num_rollouts": evaluation.num_rollouts,
        "num_failed": evaluation.num_failed,
        "metrics": evaluation.metrics,
    }
