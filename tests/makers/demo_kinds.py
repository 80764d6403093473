"""26 runs of all kinds in two projects, for pictures of the page: healthy, dead, broken, constant, long, short, without a
server."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_protocol.wire import Dropped, ErrorDetail, JobReport, TrainConfig
from art_server.jobs.advice import ADVICE
from art_server.store.model_folder import ModelFolder
from art_watch.context import TOKENS
from tests.makers.demo import log, make_demo, time_of, write_checkpoints, write_jobs
from tests.makers.demo_groups import ANSWERS

STEPS, LONG = 30, 5000
SEVERAL_LINES = "I found three offers:\n\n- OS 482:    118 euros\n- TP 1276:   143 euros\n- LX 2071:   240 euros\n\nThe first is the cheapest."
GAPS = {"loss/logprob_gap_mean": 0.9, "loss/logprob_gap_max": 8e4}
Row = dict[str, Any]


def make_kinds(root: Path) -> None:
    """Makes the runs. Their kind is in their name."""
    healthy = make_demo(root, runs=14, steps=STEPS, rollouts=48, token_steps=2)
    newest = healthy[0].trajectories_file("train", STEPS)
    content = gzip.decompress(newest.read_bytes()).decode()
    newest.write_bytes(gzip.compress(content.replace(json.dumps(ANSWERS[2]), json.dumps(SEVERAL_LINES)).encode()))
    others = make_demo(root, runs=11, steps=STEPS, rollouts=16, token_steps=1, project="production")
    kinds: list[tuple[str, Callable[[Row], Row]]] = [
        ("dead", make_dead),
        ("broken", make_broken),
        ("constant", make_constant),
    ]
    for (name, change), folder in zip(kinds, others, strict=False):
        rewrite(rename(folder, name), change)
    long = rename(others[3], "long")
    lengthen(long)
    rename(others[4], "a-name-as-long-as-names-may-be-with-every-setting-of-the-sweep-lr-2e-5-seed-17")
    dead, broken, constant = (ModelFolder(root, "production", name) for name in ("dead", "broken", "constant"))
    write_jobs(root, [(folder, step) for folder in (broken, constant) for step in range(1, STEPS + 1)])
    write_jobs(root, [(long, step) for step in range(LONG - STEPS, LONG + 1)])
    equal = Dropped(reason="all rewards in the group are equal: no signal", count=2, unit="group")
    config = TrainConfig(learning_rate=1.0, passes=2)
    note = f"2 of 2 groups: {ADVICE['equal']}"
    report = JobReport(num_groups=2, dropped=[equal], config=config.model_dump(), notes=[note])
    write_jobs(root, [(dead, step) for step in range(1, STEPS + 1)], report=report.model_dump_json())
    error = ErrorDetail(message="the gap is 1.3 on average; rounding explains at most 1: start the server with --exact")
    failed = {"state": "failed", "last_error": error.model_dump_json(), "report": "{}"}
    write_jobs(root, [(broken, STEPS + 1)], **failed)
    log(ModelFolder(root, "production", "judge-without-a-server"), 0, {"val/reward": 0.5})
    assert len(healthy) + len(others) + 1 == 26


def rename(folder: ModelFolder, name: str) -> ModelFolder:
    folder.path.rename(folder.path.with_name(name))
    renamed = ModelFolder(folder.path.parents[2], folder.project, name)
    renamed.create(renamed.read().model_copy(update={"name": name}), folder.path)
    return renamed


def rewrite(folder: ModelFolder, change: Callable[[Row], Row]) -> None:
    rows = (change(json.loads(line)) for line in folder.history_file.read_text().splitlines())
    folder.history_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_dead(row: Row) -> Row:
    groups = row["data/step_num_groups_submitted"]
    nothing = dict.fromkeys(
        ("train/reward", "train/reward_std_dev", "train/is_correct", "data/step_num_groups_trainable", TOKENS), 0.0
    )
    without_loss = {name: value for name, value in row.items() if not name.startswith("loss/")}
    return without_loss | nothing | {"data/step_num_groups_dead": groups}


def make_broken(row: Row) -> Row:
    """From step 12 to 17 nothing was measured; at step 20 the loss is no number, and the ratios are huge."""
    if 12 <= row["step"] <= 17:
        return {name: value for name, value in row.items() if "/" not in name}
    if row["step"] >= 20:
        return row | {"loss/entropy": float("nan"), "loss/importance_ratio_p99": 4e6} | GAPS
    return row


def make_constant(row: Row) -> Row:
    ratios = {name: 1 + 2e-6 for name in row if "ratio" in name}
    return row | ratios | {"train/reward": 0.5, "throughput/avg_trainer_tok_per_s": 80_000.0, "loss/entropy": 0.0}


def lengthen(folder: ModelFolder) -> None:
    rows = [json.loads(line) for line in folder.history_file.read_text().splitlines()]
    write_checkpoints(folder, LONG)
    with folder.history_file.open("w") as history:
        for step in range(1, LONG + 1):
            row = rows[step % STEPS] | {
                "step": step,
                "training_step": step,
                "sampled_step": step - 1.0,
                "recorded_at": time_of(LONG - step, 3).isoformat(),
                "throughput/avg_trainer_tok_per_s": 80_000 + step,
            }
            history.write(json.dumps(row) + "\n")
