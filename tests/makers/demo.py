"""A folder of runs as a server leaves it, made quickly: histories, checkpoints, rollouts with traces, token records.

Groups are made once and repeated, with rewards that rise, so that 100,000 rollouts take seconds. Some contain hostile
text. `scripts/screenshots` and the tests of the page use it.
"""

import contextlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from art_protocol import history as rows
from art_protocol.wire import Dropped, JobReport, LoRAConfig, TrainConfig, Unused
from art_server.shared import clock
from art_server.store.database import insert
from art_server.store.model_folder import CheckpointRecord, ModelFolder, ModelRecord
from art_server.store.model_table import ModelTable
from art_server.store.server_database import open_server_database
from tests.makers.demo_groups import NUM_DISTINCT, DemoGroup, Words, logged, make_group

NAMES = ("webnav-8b", "webnav-lr2e5", "sql-repair", "tau-airline", "math-hints", "2048-small")
STEP_SECONDS = 97
LEARNING_RATE = 2e-5
HOSTILE_METRIC = "loss/<b onclick=alert(1)>bold</b>, %{x}"
KEPT_STEPS = 6


def make_demo(
    root: Path,
    runs: int = 3,
    steps: int = 30,
    rollouts: int = 48,
    token_steps: int | None = None,
    project: str = "demo",
) -> list[ModelFolder]:
    """Makes models in one project, each with this number of trained steps and of rollouts per step. Only the newest
    `token_steps` have records of their tokens (None: all)."""
    words, chance = Words(), random.Random(7)
    size = min(8, rollouts)
    groups = [make_group(words, chance, index, size) for index in range(NUM_DISTINCT)]
    parts = [rows.pack_rows([group.row]) for group in groups]
    validations = [rows.pack_rows([logged(group.row)]) for group in groups]
    per_step = max(1, rollouts // size)
    folders = [ModelFolder(root, project, name) for name in itertools.islice(model_names(), runs)]
    for number, folder in enumerate(folders):
        record = ModelRecord(name=folder.name, project=project, base_model="Qwen/Qwen3-8B", lora=LoRAConfig(rank=16))
        folder.create(record, root / "logs" / "engine.log")
        for split in ("train", "val"):
            (folder.path / "trajectories" / split).mkdir(parents=True)
        (folder.path / "tokens").mkdir()
        with (folder.path / "history.jsonl").open("w") as history:
            for step in range(1, steps + 1):
                chosen = choose(groups, step, number, per_step)
                write_rollouts(folder, "train", step, [parts[index] for index in chosen])
                if step % 5 == 0:
                    write_rollouts(folder, "val", step, [validations[index] for index in chosen[:1]])
                if token_steps is None or step > steps - token_steps:
                    write_tokens(folder, step, [groups[index] for index in chosen], words)
                step_groups = [groups[index] for index in chosen]
                history.write(json.dumps(history_row(step, number, step_groups, steps)) + "\n")
        write_checkpoints(folder, steps)
    write_jobs(root, [(folder, step) for folder in folders for step in range(1, steps + 1)])
    return folders


def write_jobs(root: Path, steps: Sequence[tuple[ModelFolder, int]], **changes: Any) -> None:
    """Adds a done job for each of these steps to the table of jobs."""
    with contextlib.closing(open_server_database(root)) as database, database.changes("jobs") as connection:
        table = ModelTable(database)
        numbers = {(row.project, row.name): row.model for row in table.rows()}
        for folder, step in steps:
            names = (folder.project, folder.name)
            if names not in numbers:
                numbers[names] = table.add(folder.read())
            insert(connection, "jobs", job_row(folder, step) | {"model": numbers[names]} | changes)


def job_row(folder: ModelFolder, step: int) -> dict[str, Any]:
    """A row of the table of jobs. The job of step 1 has a note."""
    config = TrainConfig(learning_rate=LEARNING_RATE)
    equal = "all rewards in the group are equal: no signal"
    dead = Dropped(reason=equal, count=1, unit="group")
    report = JobReport(
        num_groups=6,
        num_groups_trained=5,
        num_trajectories=47,
        num_trajectories_trained=39,
        num_failed_rollouts=1,
        num_trained_tokens=3000 + step,
        num_sampled_tokens=4000 + step,
        unused=[
            Unused(reason=equal, num_rollouts=8, num_tokens=1000),
            Unused(reason="the rollout failed", num_rollouts=1),
        ],
        config=config.model_dump(),
        dropped=[dead],
        notes=["2 groups were sampled twice"] if step == 1 else [],
    )
    return {
        "job_id": f"{folder.model_id}-{step}",
        "request_digest": "",
        "config": config.model_dump_json(),
        "report": report.model_dump_json(),
        "created_at": clock.now() - 60.0,
        "finished_at": clock.now() - 60.0 + STEP_SECONDS,
        "state": "done",
        "phase": "finish",
        "seconds": 31.0,
        "target_step": step,
    }


def log(folder: ModelFolder, step: int, metrics: Mapping[str, float]) -> None:
    """Appends a line to history.jsonl, as a server does."""
    folder.append_history(rows.history_row(step, metrics, datetime.now(UTC).isoformat()))


def rows_by_step(file: Path) -> dict[int, dict[str, Any]]:
    """The lines of a history.jsonl, those of a step as one."""
    merged: dict[int, dict[str, Any]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        merged.setdefault(row["step"], {}).update(row)
    return merged


def model_names() -> Iterator[str]:
    yield from NAMES
    for number in itertools.count(1):
        yield f"sweep-{number:03d}"


def choose(groups: Sequence[DemoGroup], step: int, number: int, per_step: int) -> list[int]:
    """The groups of a step. Step 1 begins with the special ones; later steps take groups with higher rewards."""
    if step == 1:
        return [index % len(groups) for index in range(per_step)]
    chance = random.Random(step * 1009 + number)
    ranked = sorted(range(len(groups)), key=lambda index: sum(groups[index].rewards))
    middle = len(groups) * min(0.85, 0.2 + 0.7 * (1 - math.exp(-step / (12 + 3 * number))))
    positions = (int(chance.gauss(middle, 5)) for _ in range(per_step))
    return [ranked[min(len(groups) - 1, max(0, position))] for position in positions]


def write_rollouts(folder: ModelFolder, split: str, step: int, parts: Sequence[bytes]) -> None:
    folder.trajectories_file(split, step).write_bytes(b"".join(parts))


def write_tokens(folder: ModelFolder, step: int, groups: Sequence[DemoGroup], words: Words) -> None:
    """Writes the record of a step's tokens, in the format of `art_server/trainer/token_record.py`."""
    first = 0
    described: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        trajectories: list[list[list[int]]] = []
        for lengths in group.spans:
            stops = list(itertools.accumulate(lengths, initial=first))
            trajectories.append([[a, b] for a, b in itertools.pairwise(stops)])
            first = stops[-1]
        described.append({"number": number, "trajectories": trajectories})
    tensors = {name: np.concatenate([group.columns[name] for group in groups]) for name in groups[0].columns}
    metadata = {"groups": json.dumps(described), "texts": json.dumps(words.texts())}
    save_file(tensors, folder.tokens_file(step), metadata)


def time_of(steps_ago: int, number: int) -> datetime:
    """When a step was recorded. Run 0 is the newest."""
    return datetime.now(UTC) - timedelta(hours=5 * number, seconds=STEP_SECONDS * steps_ago + 40)


def history_row(step: int, number: int, groups: Sequence[DemoGroup], steps: int) -> dict[str, Any]:
    """A row of history.jsonl, with the names of a real one and the rewards of the step's rollouts."""
    chance = random.Random(step * 31 + number)
    rewards = [reward for group in groups for reward in group.rewards]
    dead = sum(len(set(group.rewards)) < 2 for group in groups)
    failed = sum(len(group.row["exceptions"]) for group in groups)
    tokens = sum(len(group.columns["token_ids_T"]) for group in groups)
    at = time_of(steps - step, number)
    row: dict[str, Any] = {
        "train/reward": float(np.mean(rewards)),
        "train/reward_std_dev": float(np.mean([np.std(group.rewards) for group in groups])),
        "train/exception_rate": failed / (failed + len(rewards)),
        "train/num_tool_calls": 1.0,
        "train/is_correct": float(np.mean([reward > 0.5 for reward in rewards])),
        HOSTILE_METRIC: chance.random(),
        **loss_metrics(step, steps, chance),
        **data_metrics(len(groups), dead, len(rewards), tokens, chance),
        **time_metrics(tokens, chance),
        "sampled_step": step - 1.0,
        "sampled_step_min": step - 1.0,
        "sampled_step_max": step - 1.0,
        "step": step,
        "training_step": step,
        "recorded_at": at.isoformat(),
        "job_id": f"{step:032x}",
    }
    if step % 5 == 0:
        row |= {"val/reward": float(np.mean(groups[0].rewards)), "val/exception_rate": 0.0}
    return row


def loss_metrics(step: int, steps: int, chance: random.Random) -> dict[str, float]:
    gap = 0.021 * math.exp(chance.gauss(0, 0.2)) * (1 + 0.6 * step / steps)
    return {
        "loss/train": chance.gauss(-0.01, 0.01),
        "loss/grad_norm": abs(chance.gauss(0.3, 0.08)),
        "loss/learning_rate": LEARNING_RATE,
        "loss/entropy": 0.25 + 0.6 * math.exp(-step / 20) + chance.gauss(0, 0.01),
        "loss/clipped_token_fraction": abs(chance.gauss(0.012, 0.004)),
        "loss/corrected_token_fraction": abs(chance.gauss(0.001, 0.0004)),
        "loss/policy_ratio_mean": chance.gauss(1, 0.002),
        "loss/policy_ratio_p95": 1.02 + abs(chance.gauss(0, 0.01)),
        "loss/policy_ratio_p99": 1.06 + abs(chance.gauss(0, 0.02)),
        "loss/importance_ratio_mean": chance.gauss(1, 0.002),
        "loss/importance_ratio_p95": 1.05 + abs(chance.gauss(0, 0.02)),
        "loss/importance_ratio_p99": 1.14 + abs(chance.gauss(0, 0.05)),
        "loss/logprob_gap_mean": gap,
        "loss/logprob_gap_max": gap * 22 * math.exp(chance.gauss(0, 0.3)),
        "loss/logprob_gap_num_tokens": 5210.0,
    }


def data_metrics(
    num_groups: int, num_dead: int, num_rollouts: int, tokens: int, chance: random.Random
) -> dict[str, float]:
    saving = 0.45 + chance.gauss(0, 0.03)
    return {
        "data/step_num_groups_submitted": float(num_groups),
        "data/step_num_groups_trainable": float(num_groups - num_dead),
        "data/step_num_groups_dead": float(num_dead),
        "data/step_num_trajectories": float(num_rollouts),
        "data/step_num_rows": float(num_rollouts),
        "data/step_trainable_assistant_tokens": float(round(tokens * 0.3)),
        "data/step_num_gradient_steps": 1.0,
        "data/step_row_tokens": float(tokens),
        "data/step_computed_tokens": float(round(tokens * (1 - saving))),
        "data/step_shared_token_saving": saving,
        "data/step_is_shared": 1.0,
    }


def time_metrics(tokens: int, chance: random.Random) -> dict[str, float]:
    train = tokens / 900 + chance.gauss(2, 0.3)
    return {
        "time/job_pause_s": abs(chance.gauss(0.5, 0.1)),
        "time/job_train_s": train,
        "time/job_save_s": abs(chance.gauss(1.1, 0.2)),
        "time/job_load_s": abs(chance.gauss(0.8, 0.2)),
        "time/job_finish_s": abs(chance.gauss(0.1, 0.02)),
        "time/step_forward_s": train * 0.3,
        "time/step_backward_s": train * 0.6,
        "time/step_optimizer_s": 0.2,
        "throughput/avg_trainer_tok_per_s": tokens / train,
    }


def write_checkpoints(folder: ModelFolder, steps: int) -> None:
    """The newest steps, with small adapters."""
    for step in range(max(0, steps - KEPT_STEPS + 1), steps + 1):
        checkpoint = folder.checkpoint_dir(step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "adapter_config.json").write_text("{}")
        (checkpoint / "adapter_model.safetensors").write_bytes(bytes(45_000 + step))
        created_at = time_of(steps - step, 0).timestamp()
        record = CheckpointRecord(step=step, created_at=created_at, unchanged=step % 11 == 5)
        (checkpoint / "checkpoint.json").write_text(record.model_dump_json())
