"""Early stopping by validations (`finetuning.validation.patience`), and the best step of a run."""

from collections.abc import Sequence

import art
from art.finetune.run_record import ValidationRow


def has_stalled(validations: Sequence[ValidationRow], patience: int | None) -> bool:
    """Whether none of the last `patience` validations was better than the best before. Failed validations do not count."""
    rewards = [row.avg_reward for row in validations if row.avg_reward is not None]
    if patience is None or not rewards:
        return False
    return len(rewards) - 1 - rewards.index(max(rewards)) >= patience


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
