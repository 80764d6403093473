"""`art eval`: the validation rows at a step, and the difference from another step."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import art
from art.files import write_whole
from art.finetune.errors import FinetuneError, NoServer, WrongInput
from art.finetune.runs import Overrides, Workflows, connected, prepare

FILE = "eval.json"


async def evaluate(
    file: str | Path | Mapping[str, Any],
    overrides: Overrides = (),
    *,
    step: str | None = None,
    baseline: str | None = None,
    reps: int | None = None,
) -> art.Evaluation:
    """The mean reward of a step on the file's validation rows, and with a baseline the paired difference.

    A step is a number, "best", "base", or None for the newest. `eval.json` in the output folder has the figures.

    Raises:
        WrongInput: the file has no validation rows, or there is no such step.
        NoServer: no server answers.
        FinetuneError: too many rollouts failed.
    """
    job = prepare(file, overrides)
    finetuning = job.config.finetuning
    if not job.validation_rows:
        raise WrongInput(["no validation rows: set finetuning.validation.dataset, or add --validation_dataset FILE"])
    async with connected(job.config) as model, Workflows(job) as workflows:
        steps: list[int | Literal["base"]] = [await _step(model, each) for each in (step, baseline)]
        agent = await workflows.agent(model, finetuning.validation.reward or finetuning.reward_function)
        session = f"eval-{uuid.uuid4().hex[:12]}"
        try:
            found = await art.evaluate(
                model,
                agent.player(session, finetuning.seed or 0),
                job.validation_rows,
                step=steps[0],
                baseline=None if baseline is None else steps[1],
                reps=reps or finetuning.validation.reps,
                seed=finetuning.seed,
                max_exceptions=finetuning.max_exceptions,
                max_concurrent_rollouts=job.config.eval.general.max_concurrency,
            )
        except art.ArtConnectionError as error:
            raise NoServer(f"the server was lost: {error}") from error
        except Exception as error:
            raise FinetuneError(f"rollouts failed: {type(error).__name__}: {error}") from error
    finetuning.output_dir.mkdir(parents=True, exist_ok=True)
    write_whole(finetuning.output_dir / FILE, json.dumps(_figures(found), indent=2).encode() + b"\n")
    return found


async def _step(model: art.TrainableModel, named: str | None) -> int | Literal["base"]:
    checkpoints = await model.checkpoints()
    if named is None:
        return await model.get_step()
    if named == "base":
        return "base"
    if named == "best":
        best = [each.step for each in checkpoints if each.is_best]
        return best[0] if best else await model.get_step()
    known = [each.step for each in checkpoints]
    if not named.isdecimal() or int(named) not in known:
        raise WrongInput([f"no step {named}: kept are {', '.join(map(str, known))}; or best, base"])
    return int(named)


def _figures(found: art.Evaluation) -> dict[str, Any]:
    def of(evaluation: art.Evaluation) -> dict[str, Any]:
        return {
            "name": evaluation.name,
            "step": evaluation.step,
            "reward": asdict(evaluation.reward),
            "interval": list(evaluation.reward.interval),
            "row_rewards": list(evaluation.scenario_rewards),
            "num_rollouts": evaluation.num_rollouts,
            "num_failed": evaluation.num_failed,
            "metrics": evaluation.metrics,
        }

    figures = of(found)
    if found.baseline is not None and found.difference is not None:
        figures["baseline"] = of(found.baseline)
        figures["difference"] = asdict(found.difference) | {"interval": list(found.difference.interval)}
    return figures
