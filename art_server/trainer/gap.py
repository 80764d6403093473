"""Is the engine the policy that is trained? Its log-probabilities say so, token by token, before anything is trained.

Rounding separates two programs that compute the same policy; a wrong adapter, template, kernel or step separates them by
far more. docs/precision.md has the measured gaps that the bars are drawn from.
"""

from art_server.shared.tasks import TrainTask

MIN_TOKENS = 64
"""Fewer tokens than these say nothing of a mean."""


class GapTooLarge(Exception):
    """The engine's log-probabilities are not those of the policy: nothing was trained."""


def judge_gap(metrics: dict[str, float], task: TrainTask) -> list[str]:
    """The note that a high gap is worth, none for one that is fine or cannot be judged.

    Raises GapTooLarge for one that is wrong.
    """
    bars, num = task.gap_bars, int(metrics["loss/logprob_gap_num_tokens"])
    if bars is None or num < MIN_TOKENS:
        return []
    mean, largest = metrics["loss/logprob_gap_mean"], metrics["loss/logprob_gap_max"]
    seen = f"the engine's log-probabilities differ from the trainer's by {mean:.2g} on average, {largest:.2g} at most, over {num} tokens of step {task.start_step}"
    if mean > bars.wrong or (bars.largest is not None and largest > bars.largest):
        raise GapTooLarge(
            f"{seen}; at most {bars.wrong:.2g} is rounding. Nothing was trained: the engine samples from another policy than the "
            "one that is trained. Look whether both have the same base weights and adapter, whether --engine-arg changes "
            "the model (quantization), or compute both in float32; --gap-limit 0 turns this off"
        )
    if mean > bars.high:
        return [
            f"{seen}: more than was ever measured with these number types ({bars.high:.2g}); float32 closes it"
        ]
    return []
