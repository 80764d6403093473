"""The learning rate of a step: constant by default, with warm-up, cosine, or a value from the model's width.

After a rollback, a fork or an import AdamW may have lost its moments. The schedule continues, and the rate rises anew.
"""

import math
from dataclasses import dataclass

from art_protocol.wire import TrainConfig

WIDTH_POWERS = {"qwen": 0.0775, "llama": 0.781}
"""How fast the best rate falls with the model's width, by family. Other families use qwen's."""

FRESH_MOMENTS_STEPS = 10
"""Optimizer steps over which the rate rises after AdamW's moments were lost: 1 / (1 - beta1), the steps over which
AdamW averages gradients. The first step from zero moments moves every weight by the whole rate: for gradients that are
noise 4.4 times the length of a later step (sqrt((1 + beta1) / (1 - beta1))). With this rise no step is longer than 1.5
times a later step (`tests/quick/trainer/test_schedule.py`)."""


@dataclass(slots=True)
class RateSchedule:
    """The learning rate of a job's optimizer steps."""

    config: TrainConfig
    base_rate: float
    num_steps: int
    """Optimizer steps that the model has taken."""
    moments_age: int
    """The number of these steps that AdamW's moments are made of."""

    def rate(self, number: int) -> float:
        """The rate of the next optimizer step; `number` is the step's index in a list of rates."""
        rates = self.config.learning_rate
        rate = rates[number] if isinstance(rates, list) else self.base_rate
        rate *= learning_rate_factor(self.config, self.num_steps)
        return rate * fresh_moments_factor(self.num_steps, self.moments_age)

    def advance(self) -> None:
        self.num_steps, self.moments_age = self.num_steps + 1, self.moments_age + 1


def base_learning_rate(config: TrainConfig, model_type: str, hidden_size: int) -> tuple[float, str]:
    """The rate before any schedule, and for learning_rate="auto" the rule as a note (else "").

    auto: 5e-5 * 10 * (2000 / width) ** power, which is the rate of full fine-tuning, times 10 for LoRA.
    Source: Schulman and Thinking Machines 2025, "LoRA Without Regret", as in tinker-cookbook's hyperparam_utils.py.
    """
    if isinstance(config.learning_rate, list):
        return config.learning_rate[0], ""
    if config.learning_rate != "auto":
        return config.learning_rate, ""
    family = next((name for name in WIDTH_POWERS if name in model_type), "qwen")
    power = WIDTH_POWERS[family]
    rate = 5e-5 * 10 * (2000 / hidden_size) ** power
    return rate, f"learning_rate=auto: 5e-5 * 10 * (2000 / {hidden_size}) ** {power} = {rate:.3g}"


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """The factor on the rate at a model's optimizer step, from 0: from `schedule_begins` on a linear warm-up, then constant or half
    a cosine.

    Source of the cosine: Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5 without restarts.
    """
    step = max(0, step - config.schedule_begins)  # a rollback may lead behind the beginning
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    assert config.schedule_steps is not None
    length = max(1, config.schedule_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / length)
    return (1 + math.cos(math.pi * done)) / 2


def fresh_moments_factor(step: int, moments_age: int) -> float:
    """The factor on the rate at a model's optimizer step, from 0, for moments of `moments_age` steps.

    1 for moments as old as the model: at the model's start `warmup_steps` decides.
    Source: Ma and Yarats 2019, arXiv:1910.04209, on the length of Adam's first steps.
    """
    if moments_age >= step:
        return 1.0
    return min(1.0, (moments_age + 1) / FRESH_MOMENTS_STEPS)
