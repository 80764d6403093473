"""`reasoning_gym`: the tasks of reasoning-gym's generators, which score their answers (extra `environments`)."""

import importlib
import re
import warnings
from dataclasses import dataclass
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class ReasoningTask:
    """A question and its score. It is a text environment of one turn, so `play` and `art.evaluate` take it."""

    question: str
    dataset: Any
    """reasoning-gym's dataset."""
    entry: dict[str, Any]
    """reasoning-gym's item: question, answer, metadata."""

    def score(self, text: str) -> float:
        """The generator's score from 0 to 1 of the text in the last <answer> tag, without one of the whole text.

        0 for an answer that the generator cannot read.
        """
        tagged = ANSWER.findall(text)
        answer = (tagged[-1] if tagged else text).strip()
        try:
            return float(self.dataset.score_answer(answer=answer, entry=self.entry))
        except ValueError:  # such as prime_factorization's int("two")
            return 0.0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """The question. The seed has no effect: a task is one question."""
        del seed
        return self.question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The score of an answer, which ends the episode."""
        score = self.score(action)
        return "", score, True, False, {"solved": score >= 1.0}


def reasoning_gym(
    name: str, *, size: int = 64, seed: int = 0, prompt: str = "{question}", **config: Any
) -> list[ReasoningTask]:
    """`size` tasks of a generator, the same for the same seed. Other seeds give other tasks: hold some out.

    `prompt` is the form of the first message, such as "{question}\\nAnswer with a number only.". `config` has the
    generator's own settings.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
        ValueError: reasoning-gym has no such generator or setting.
    """
    try:
        with warnings.catch_warnings():  # a package that it needs has code that Python warns of
            warnings.simplefilter("ignore", SyntaxWarning)
            gym: Any = importlib.import_module("reasoning_gym")  # it takes seconds
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reasoning_gym needs pip install 'agent-reinforcement-trainer[environments]'",
            name=error.name,
        ) from error
    try:
        dataset: Any = gym.create_dataset(name, size=size, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make '{name}' with {config}: {error}") from error
    return [
        ReasoningTask(prompt.replace("{question}", entry["question"]), dataset, entry)
        for entry in (dataset[index] for index in range(size))
    ]
