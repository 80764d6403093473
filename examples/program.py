"""Code that the example programs share: flags, server, one turn of a game, and the plot of rewards."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

import art

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OTHER_RATE = 1e-4
"""The learning rate of base models for which a program has none."""
VAL_EVERY = 10
"""Steps between validations."""


def flag_parser(description: str, groups: int, learning_rates: Mapping[str, float]) -> argparse.ArgumentParser:
    """The flags of every program. `learning_rates` are the defaults by base model."""
    parser = argparse.ArgumentParser(description=description)
    parser.set_defaults(learning_rates=learning_rates)
    parser.add_argument("--model", default="art/tiny", help="base model: art/tiny, smollm2, a folder or a hub id")
    parser.add_argument("--name", help="name of the trained model (default: made from --model)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=groups, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per group")
    parser.add_argument("--learning-rate", type=float, help="default: by --model")
    parser.add_argument("--server", help="URL of a running art-server (default: start one)")
    parser.add_argument("--path", default=".art", help="folder of the started server's checkpoints and history")
    parser.add_argument("--plot", type=Path, default=Path("reward.png"))
    return parser


def make_backend(flags: argparse.Namespace) -> art.Backend:
    return art.Backend(flags.server) if flags.server else art.LocalBackend(path=flags.path)


def make_model(flags: argparse.Namespace, project: str, side: str = "") -> art.TrainableModel:
    """The model with the name in the flags. A restarted program continues to train it."""
    name = flags.name or flags.model.replace("/", "-").lower().strip(".-")
    return art.TrainableModel(name=name + side, project=project, base_model=flags.model)


def train_config(flags: argparse.Namespace, **more: Any) -> art.TrainConfig:
    # Any: `more` are other fields of the configuration
    rate = flags.learning_rate or flags.learning_rates.get(flags.model, OTHER_RATE)
    return art.TrainConfig(learning_rate=rate, **more)


async def ask(model: art.TrainableModel, trajectory: art.Trajectory, question: str, form: str) -> str:
    """Adds a question and the model's answer to the trajectory. Returns the text that the group of the regular
    expression `form` matches in the answer; empty if nothing matches."""
    trajectory.messages_and_choices.append({"role": "user", "content": question})
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=trajectory.messages(),
        max_tokens=32,
        # By default Qwen3 thinks at length. Templates without this switch ignore it.
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    choice = completion.choices[0]
    trajectory.messages_and_choices.append(choice)
    match = re.search(form, choice.message.content or "")
    return match[1] if match else ""


def report(result: art.TrainResult, title: str, names: Sequence[str]) -> float:
    """Prints the means of the reward and of the metrics `names` over a step's trajectories. Returns the mean reward."""
    means = (f"{name} {result.metrics[f'train/{name}']:.3f}" for name in ("reward", *names))
    print(f"step {result.step:3d}  {title}:  {'  '.join(means)}")
    return result.metrics["train/reward"]


def plot(curves: dict[str, list[float]], file: Path, title: str, first_step: int = 0) -> None:
    """Draws one curve for each name: the mean reward at each step."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, rewards in curves.items():
        axes.plot(range(first_step, first_step + len(rewards)), rewards, marker="o", label=name)
    axes.set(xlabel="step", ylabel="mean reward", title=title, ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
