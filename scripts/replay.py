#!/usr/bin/env -S .venv/bin/python
"""Makes a step again from its record, and compares the result with the step, bit for bit.

    scripts/replay.py [PROJECT/]NAME[@k] [--path .art]     a step in a server's folder
    scripts/replay.py FOLDER                               the folder `replay` of a checkpoint, or a copy of it

Ends with 0 if adapter and optimizer state are bit-equal, with 1 if they are not or an input differs, and with 2 if
there is no such record or the record cannot be trained.
"""

import argparse
import asyncio
import contextlib
import hashlib
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from tqdm import tqdm

from art_server.errors import InvalidInput, NotFound, ServerError, Unavailable
from art_server.jobs.gang import Gang
from art_server.jobs.replay_record import (
    BATCH_FILE,
    FOLDER,
    RECORD_FILE,
    START,
    ReplayRecord,
    base_digests,
)
from art_server.jobs.trainer_process import TrainerError
from art_server.process.place import Here
from art_server.shared.trainer_messages import Done, Progress, TrainTask, WorkerConfig
from art_server.store.base_models import CACHE_DIR, find_base_model
from art_server.store.model_folder import ADAPTER_FILE, OPTIMIZER_FILE, content_digests
from art_transfer.transfer import find_model_folder

COMPARED = {ADAPTER_FILE: "adapter", OPTIMIZER_FILE: "optimizer state"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a step again from its record, and compare.")
    parser.add_argument("record", metavar="RECORD", help="[PROJECT/]NAME[@k], or a folder `replay`")
    parser.add_argument("--path", type=Path, default=Path(".art"), help="the folder of a server (%(default)s)")
    flags = parser.parse_args(arguments)
    try:
        return 0 if replay_step(flags.record, flags.path) else 1
    except ServerError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2


def replay_step(text: str, path: Path) -> bool:
    """Makes the step again, prints the outcome, and returns whether adapter and optimizer state are bit-equal.

    Raises:
        NotFound: there is no such record.
        InvalidInput: the record cannot be read, or its base model is not here.
        Unavailable: the trainer failed.
    """
    folder = find_record(text, path)
    try:
        record = ReplayRecord.model_validate_json((folder / RECORD_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise InvalidInput(f"{folder / RECORD_FILE} cannot be read: {error}", code="bad_record") from error
    base = find_base_model(record.base_model, CACHE_DIR).path
    what = f"{record.model}, step {record.step}"
    if changed := changed_inputs(folder, record, base):
        print(f"{what} cannot be made again: these inputs differ from the record")
        print("\n".join(f"  {line}" for line in changed))
        return False
    with tempfile.TemporaryDirectory() as temporary:
        done = asyncio.run(train(folder, record, base, Path(temporary)))
        digests = content_digests(Path(temporary) / "step")
    different = [name for file, name in COMPARED.items() if digests.get(file) != record.result_files.get(file)]
    if not different:
        print(f"{what}: bit-equal ({' and '.join(COMPARED.values())})")
        return True
    print(f"{what}: {' and '.join(different)} not equal")
    for name, recorded in record.environment.items():
        if done.environment.get(name) != recorded:
            print(f"  {name} is {done.environment.get(name)}; the record has {recorded}")
    if done.environment == record.environment:
        print("  no recorded input differs: the step depends on something else, such as a GPU's order of sums")
    return False


def find_record(text: str, path: Path) -> Path:
    """The folder of a record, from MODEL[@k] or the folder's path.

    Raises:
        NotFound: there is no such record.
    """
    if (Path(text) / RECORD_FILE).is_file():
        return Path(text)
    name, _, step = text.partition("@")
    project, _, name = name.rpartition("/")
    if step and not (step.isascii() and step.isdecimal()):
        raise InvalidInput(f"'{step}' is not a step: write NAME@NUMBER", code="unknown_step")
    folder = find_model_folder(path, project, name)
    number = int(step) if step else folder.newest_step() or 0
    record_folder = folder.checkpoint_dir(number) / FOLDER
    if not (record_folder / RECORD_FILE).is_file():
        kept = [candidate for candidate in folder.steps() if (folder.checkpoint_dir(candidate) / FOLDER).exists()]
        raise NotFound(
            f"step {number} of {folder.project}/{folder.name} has no record; steps with a record: "
            f"{', '.join(map(str, kept)) or 'none'}. The newest ten steps have one",
            code="unknown_step",
        )
    return record_folder


def changed_inputs(folder: Path, record: ReplayRecord, base: Path) -> list[str]:
    """The files that differ from their digests in the record."""
    expected = {f"{START}/{name}": digest for name, digest in record.start_files.items()}
    digests = {f"{START}/{name}": digest for name, digest in content_digests(folder / START).items()}
    expected |= {f"base model {record.base_model}: {n}": d for n, d in record.base_files.items()}
    digests |= {f"base model {record.base_model}: {n}": d for n, d in base_digests(base).items()}
    expected[BATCH_FILE] = record.batch
    if (folder / BATCH_FILE).is_file():
        digests[BATCH_FILE] = "damaged"
        with contextlib.suppress(zlib.error):
            batch = zlib.decompress((folder / BATCH_FILE).read_bytes())
            digests[BATCH_FILE] = hashlib.sha256(batch).hexdigest()
    return [
        f"{name}: {'changed' if name in digests else 'missing'}"
        for name, digest in expected.items()
        if digests.get(name) != digest
    ]


def number_in(settings: dict[str, str], name: str) -> int | None:
    """A number of the record's environment; None if the step had no such number, or an earlier version made the record."""
    value = settings.get(name, "None")
    return None if value == "None" else int(value)


async def train(folder: Path, record: ReplayRecord, base: Path, temporary: Path) -> Done:
    """Runs the step with the record's settings and its number of trainer processes; the result is in `temporary`/step.

    Raises:
        Unavailable: the trainer failed.
    """
    settings = record.environment
    worker = WorkerConfig.model_validate(
        {name: settings[name] for name in ("trainer", "dtype", "device", "threads")}
        | {
            "base_model": str(base),
            "max_tokens_per_micro_batch": settings["max_tokens"],
            "checkpointing_factor": settings.get("checkpointing_factor"),
            "is_sharded": settings.get("is_sharded", "False"),
        }
    )
    here = Here(device="cuda" if worker.device.startswith("cuda") else "cpu")
    trainer = Gang(
        log_dir=temporary,
        locations=[here] * int(settings.get("ranks", "1")),
        cache_dir=temporary / "unsloth",
        meeting=temporary / "ranks",
    )
    trainer.use(worker)
    task = TrainTask(
        lora=record.lora,
        in_dir=str((folder / START).absolute()),
        out_dir=str(temporary / "step"),
        config=record.config,
        start_step=record.start_step,
        optimizer_steps=number_in(settings, "optimizer_steps"),
        lost_layers=settings.get("lost_layers", "").split(),
        max_seq_length=number_in(settings, "max_seq_length"),
        seed=record.seed,
        checkpointing=settings.get("checkpointing") == "True",
    )
    batch = zlib.decompress((folder / BATCH_FILE).read_bytes())
    with tqdm(desc=f"{record.model}, step {record.step}", unit="micro-batch") as bar:

        async def on_progress(progress: Progress) -> None:
            bar.total, bar.n = progress.total, progress.completed
            bar.set_postfix_str(progress.phase)

        try:
            return await trainer.run(task, on_progress, batch)
        except TrainerError as error:
            raise Unavailable(f"the trainer failed: {error.message}", code=error.code) from error
        finally:
            await trainer.stop()


if __name__ == "__main__":
    sys.exit(main())
