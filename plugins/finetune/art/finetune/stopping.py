"""Early stopping by validations (`finetuning.validation.patience`), and the best step of a run."""

from collections.abc import Sequence

import art
from art.finetune.run_record import State, ValidationRow


def has_stalled(validations: Sequence[ValidationRow], patience: int | None) -> bool:
    """Whether none of the last `patience` validations was better than the best before. Failed validations do not count."""
    rewards = [row.avg_reward for row in validations if row.avg_reward is not None]
    if patience is None or not rewards:
        return False
    return len(rewards) - 1 - rewards.index(max(rewards)) >= patience


def doubt(validations: Sequence[ValidationRow]) -> str:
    """What is not decided about a run that has stalled, as the end of its line; empty where the intervals decide."""
    estimates = [row.estimate for row in validations if row.avg_reward is not None]
    best, last = max(estimates, key=lambda estimate: estimate.mean), estimates[-1]
    if last.interval[1] < best.interval[0]:
        return ""
    return (
        f". Not decided: the intervals of the best validation and of the last overlap (n={last.num_scenarios}); more held-out rows "
        "or --validation_reps 4 make the intervals narrower"
    )


def fall(state: State) -> str | None:
    """How far the last validation is below the first, in words; None if the validation did not fall."""
    if state.start is None or not state.validations_of_trained:
        return None
    first, last = state.start.estimate, state.validations_of_trained[-1].estimate
    if last.mean >= first.mean:
        return None
    overlap = " (the intervals overlap)" if last.interval[1] >= first.interval[0] else ""
    return f"validation fell from {first} to {last}{overlap}"


async def best_step(model: art.TrainableModel, validations: Sequence[ValidationRow]) -> str | None:
    """The best step in words: the step that the server serves as NAME@best, and that no deletion of checkpoints takes. None without
    a validation that succeeded."""
    rewards = {row.step: row.avg_reward for row in validations if row.avg_reward is not None}
    if not rewards:
        return None
    best = next((checkpoint.step for checkpoint in await model.checkpoints() if checkpoint.is_best), None)
    if best is None:
        return None
    reward = f" (validation {rewards[best]:.4f})" if best in rewards else ""
    name = model.get_inference_name()
    return f"the best step is {best}{reward}, kept as {name}@{best} and {name}@best"
