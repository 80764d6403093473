"""`art eval`: the validation rows at a step, and the difference from another step."""

import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import art
from art.files import write_whole
from art.finetune.errors import WrongInput
from art.finetune.interfaces import say
from art.finetune.run_record import to_json
from art.finetune.runs import Overrides, connected, loaded, prepare

FILE = "eval.json"


async def evaluate(
    file: str | Path | Mapping[str, Any],
    overrides: Overrides = (),
    *,
    step: str | None = None,
    baseline: str | None = None,
    reps: int | None = None,
) -> art.Evaluation:
    """The mean reward of a step on the file's validation rows, or on the training rows if the file has no validation rows. With
    `baseline` also the paired difference from that step.

    A step is a number, "best", "base", or None for the newest step. The best step has the highest val/reward, or the highest
    train/reward without validations. `eval.json` in the output folder and eval/reward in the history have the figures.

    Raises:
        WrongInput: the file is wrong, or there is no such step.
        NoServer: no server answers.
        FinetuneError: too many rollouts failed.
    """
    checked_file = prepare(file, overrides)
    finetuning = checked_file.config.finetuning
    if finetuning.validation.dataset is None:
        say("the file has no finetuning.validation.dataset: the rows of training are evaluated")
    async with loaded(checked_file) as loaded_file, connected(loaded_file) as connection:
        evaluation = await art.evaluate(
            connection.model,
            connection.validation_agent.player(f"eval-{uuid.uuid4().hex[:12]}", finetuning.seed or 0),
            connection.validation_rows or connection.rows,
            step=await _step(connection.model, step),
            baseline=await _step(connection.model, baseline),
            reps=reps or finetuning.validation.reps,
            split="eval",  # not "val": these rows can differ from the run's, whose val/reward decides the best step
            seed=finetuning.seed,
            max_exceptions=finetuning.max_exceptions,
            max_concurrent_rollouts=checked_file.config.eval.general.max_concurrency,
        )
    figures = _figures(evaluation)
    if evaluation.baseline is not None and evaluation.difference is not None:
        figures["baseline"] = _figures(evaluation.baseline)
        figures["difference"] = asdict(evaluation.difference)
    write_whole(finetuning.output_dir / FILE, to_json(figures))
    return evaluation


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
