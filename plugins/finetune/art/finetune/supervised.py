"""Training on the examples of a file (`art sft`), with the loss of held-out examples after each step of the model.

Each step of the model has a key of the examples and the settings. So the same command continues after any end: the server answers a
finished step at once, and trains none twice. There is no output folder.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import art
from art import sft
from art.finetune.errors import FinetuneError, NoServer, WrongInput
from art.finetune.interfaces import say
from art.finetune.reading import dataset_of_file, described
from art.finetune.rows import MESSAGES, DatasetRow, digest, hold_out, load_rows
from art.finetune.runs import backend_at
from art.finetune.sections import DatasetSection
from art_protocol.demonstrations import SHAREGPT

WARMUP_RATIO = 0.1
"""The share of the optimizer steps over which the learning rate rises, as in `art.utils.sft`. Then it falls by half a cosine."""
FINAL_SHARE = 0.1
"""The share of the highest learning rate at which the cosine ends: a last step at rate 0 would change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run of `art sft` is asked for."""

    examples: str | Path
    """A file, or hub:OWNER/NAME."""
    model: str
    """PROJECT/NAME."""
    base_model: str
    validation_dataset: str | Path | None
    validation_share: float | None
    question_key: str
    answer_key: str
    num_epochs: int
    batch_size: int
    learning_rate: float
    eval_steps: int | None
    """Optimizer steps of a step of the model; None: an epoch."""
    patience: int | None
    rank: int | None
    """Of a new model's LoRA; None: the default, or the rank of an existing model."""
    trackers: list[str]


def settings_of(flags: argparse.Namespace) -> Settings:
    """The settings in the flags of the command."""
    return Settings(**{field.name: getattr(flags, field.name) for field in fields(Settings)})


async def train(settings: Settings) -> None:
    """Trains the model, or continues after an earlier end, and names the best step.

    Raises:
        WrongInput: a setting or an example is wrong.
        NoServer: no server answers.
        FinetuneError: the server refuses the model or the examples, or a job failed.
    """
    _check(settings)
    trained, held_out = _load(settings)
    project, _, name = settings.model.rpartition("/")
    try:
        async with backend_at(None, trackers=settings.trackers) as backend:
            lora = None if settings.rank is None else art.LoRAConfig(rank=settings.rank)
            model = art.TrainableModel(name=name, project=project, base_model=settings.base_model, lora=lora)
            await model.register(backend)
            await _train_chunks(model, settings, trained, held_out)
    except art.ArtConnectionError as error:
        raise NoServer(f"{error}. The same command continues then") from error
    except art.ArtJobError as error:
        raise FinetuneError(
            f"{error}. Another setting, such as --batch_size, begins the examples anew, from the model's newest step"
        ) from error
    except (art.ArtError, ValueError) as error:
        raise FinetuneError(str(error)) from error


async def _train_chunks(
    model: art.TrainableModel, settings: Settings, trained: list[DatasetRow], held_out: list[DatasetRow]
) -> None:
    validation = [_trajectory_of(settings, row) for row in held_out]
    same_steps = dict.fromkeys(("examples", "validation_dataset", "patience", "trackers"))
    run_id = digest([*trained, *held_out], asdict(settings) | same_steps)
    steps_per_epoch = math.ceil(len(trained) / settings.batch_size)
    total, losses = steps_per_epoch * settings.num_epochs, dict[int, float]()
    for chunk in _chunks(settings, [_trajectory_of(settings, row) for row in trained], steps_per_epoch):
        result = await model.train_sft(
            chunk.trajectories,
            chunk.config,
            validation=validation,
            idempotency_key=f"sft-{run_id}-{chunk.step}",
        )
        done = chunk.step + math.ceil(len(chunk.trajectories) / settings.batch_size)
        of_validation = ""
        if validation:
            losses[result.step] = result.metrics["val/loss"]
            of_validation = f", validation loss {losses[result.step]:.4f}"
        say(
            f"epoch {chunk.epoch + 1}/{settings.num_epochs}, optimizer step {done}/{total}: loss {result.metrics['loss/train']:.4f}"
            f"{of_validation}, step {result.step}"
        )
        if settings.patience is not None and _has_stalled([*losses.values()], settings.patience):
            say(f"the last {settings.patience} validations were not better than an earlier one: the run ends")
            break
    best = next((checkpoint.step for checkpoint in await model.checkpoints() if checkpoint.is_best), None)
    name = model.get_inference_name()
    if best is None:
        say(f"without validation there is no best step; the newest serves as {name}")
    else:
        of_best = f" (validation loss {losses[best]:.4f})" if best in losses else ""
        say(f"the best step is {best}{of_best}, kept as {name}@{best} and {name}@best")


def _chunks(settings: Settings, trajectories: list[art.Trajectory], steps_per_epoch: int) -> Iterator[sft.SFTChunk]:
    return sft.chunks(
        trajectories,
        chunk_size=settings.eval_steps or steps_per_epoch,
        epochs=settings.num_epochs,
        batch_size=settings.batch_size,
        peak_lr=settings.learning_rate,
        min_lr=FINAL_SHARE * settings.learning_rate,
        schedule_type="cosine",
        warmup_ratio=WARMUP_RATIO,
        shuffle=True,
        seed=0,
    )


def _has_stalled(losses: list[float], patience: int) -> bool:
    """Whether none of the last `patience` losses was lower than the lowest before."""
    return bool(losses) and len(losses) - 1 - losses.index(min(losses)) >= patience


def _check(settings: Settings) -> None:
    problems: list[str] = []
    if "/" not in settings.model.strip("/"):
        problems.append(f"--model {settings.model}: write PROJECT/NAME")
    for name in ("num_epochs", "batch_size", "eval_steps", "patience", "rank"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            problems.append(f"--{name}: must be at least 1, not {value}")
    if not 0 < settings.learning_rate <= 1:
        problems.append(f"--learning_rate: must be above 0 and at most 1, not {settings.learning_rate:g}")
    share, file = settings.validation_share, settings.validation_dataset
    if share is not None and not 0 < share < 1:
        problems.append(f"--validation_share: must be between 0 and 1, not {share:g}")
    if share is not None and file is not None:
        problems.append("--validation_share stands in place of --validation_dataset: leave one of the two out")
    if settings.patience is not None and share is None and file is None:
        problems.append("--patience needs validations: add --validation_share or --validation_dataset")
    if problems:
        raise WrongInput(problems)


def _load(settings: Settings) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """The examples that are trained, and the held-out ones, which may be none.

    Raises:
        WrongInput: a file cannot be read, or a row is no example.
    """
    rows = _rows_of(settings, settings.examples)
    if settings.validation_dataset is not None:
        return rows, _rows_of(settings, settings.validation_dataset)
    if settings.validation_share is None:
        return rows, []
    try:
        return hold_out(rows, settings.validation_share, None)
    except ValueError as error:
        raise WrongInput([f"--validation_share: {error}"]) from error


def _rows_of(settings: Settings, file: str | Path) -> list[DatasetRow]:
    try:
        section: dict[str, Any] = dataset_of_file(file)
    except ValueError as error:
        raise WrongInput([f"{file}: {error}"]) from error
    # The whole rows: `load_rows` would take the answer of a chat row for no part of its messages.
    loaded = load_rows(DatasetSection.model_validate(section | {"structure": {"disable": True}}), "dataset")
    if loaded.read_as:
        say(f"{file}: {loaded.read_as}")
    for row in loaded.rows:
        try:
            _trajectory_of(settings, row)
        except ValueError as error:
            raise WrongInput([f"{file}: {row.location}: {error}"]) from error
    return loaded.rows


def _trajectory_of(settings: Settings, row: DatasetRow) -> art.Trajectory:
    """The example of a row: its `messages`, or a question and an answer.

    Raises:
        ValueError: the row is no example.
    """
    columns = row.columns
    messages: Any = columns.get(MESSAGES)
    if messages is None and "conversations" in columns:
        raise ValueError(f"its `conversations` are of the form ShareGPT: {SHAREGPT}")
    if messages is None:
        missing = [
            f"{key!r} (--{flag})"
            for flag, key in (("question_key", settings.question_key), ("answer_key", settings.answer_key))
            if columns.get(key) in (None, "")
        ]
        if missing:
            raise ValueError(f"neither `messages` nor {' and '.join(missing)}; the columns are {', '.join(columns)}")
        messages = [
            {"role": "user", "content": str(columns[settings.question_key])},
            {"role": "assistant", "content": str(columns[settings.answer_key])},
        ]
    if not isinstance(messages, list):
        raise ValueError(f"`messages` is {described(messages)}: write a list of messages with role and content")
    return art.Trajectory(messages_and_choices=cast("list[Any]", messages), tools=columns.get("tools"))
