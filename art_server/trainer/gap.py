"""Checks before the first update that the engine samples from the policy that is trained, by the gap of each token.

Two programs that compute the same policy differ only by rounding. A wrong adapter, template, kernel or step makes a far
larger gap. docs/precision.md has the measured gaps from which the thresholds follow.
"""

from art_server.shared.tasks import TrainTask

MIN_TOKENS = 64
"""With fewer tokens the mean is not judged."""


class GapTooLarge(Exception):
    """The engine's log-probabilities are not those of the policy. Nothing was trained."""


def judge_gap(metrics: dict[str, float], task: TrainTask) -> list[str]:
    """A note for the report if the gap is high; no note if it is normal or cannot be judged.

    Raises:
        GapTooLarge: the mean or the largest gap is too large for rounding.
    """
    bars, num = task.gap_bars, int(metrics["loss/logprob_gap_num_tokens"])
    if bars is None or num < MIN_TOKENS:
        return []
    mean, largest = metrics["loss/logprob_gap_mean"], metrics["loss/logprob_gap_max"]
    seen = f"the engine's log-probabilities differ from the trainer's by {mean:.2g} on average, {largest:.2g} at most, over {num} tokens of step {task.start_step}"
    at_most = "" if bars.largest is None else f" on average and {bars.largest:.2g} for one token"
    if mean > bars.wrong or (bars.largest is not None and largest > bars.largest):
        raise GapTooLarge(
            f"{seen}; rounding explains at most {bars.wrong:.2g}{at_most}. Nothing was trained: the engine samples from "
            "another policy than the one that is trained. Check that both have the same base weights and adapter and that "
            "no --engine-arg changes the model (quantization), or compute both in float32; --gap-limit 0 turns this off"
        )
    if mean > bars.high:
        return [
            f"{seen}: more than is usual ({bars.high:.2g}); docs/precision.md has the figures of each pair of number types"
        ]
    return []
