"""Runs with `rows_per_step`, early stopping, and what a file says about LoRA, schedule and trackers; against a server that keeps
sessions and trains nothing."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import art.finetune
from art.finetune import WrongInput
from art.finetune.run_record import ValidationRow
from art.finetune.stopping import has_stalled
from plugins.finetune.tests.policy_server import PolicyServer
from plugins.finetune.tests.stopped import run_until
from tests.fakes.server import Answer, Request

pytestmark = pytest.mark.anyio

MakeFile = Callable[..., dict[str, Any]]
ROWS = {f"question {number}" for number in range(4)}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "training_metrics.jsonl").read_text().splitlines()]


def validations(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "out" / "validation_history.json").read_text())


def trained_rows(policy: PolicyServer) -> list[set[str]]:
    """The questions of each train call."""
    return [
        {
            trajectory["messages_and_choices"][0]["content"]
            for group in body["groups"]
            for trajectory in group["trajectories"]
        }
        for body in policy.trained
    ]


def assert_each_row_is_trained_once_an_epoch(policy: PolicyServer) -> None:
    """For two epochs of four rows, in steps of three rows and one."""
    trained = trained_rows(policy)
    assert [len(rows) for rows in trained] == [3, 1, 3, 1]
    assert trained[0] | trained[1] == trained[2] | trained[3] == ROWS
    assert [body["expected_step"] for body in policy.trained] == [0, 1, 2, 3]


async def test_an_epoch_has_a_step_for_so_many_rows(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses = await art.finetune.run(make_file(finetuning__rows_per_step=3))
    assert_each_row_is_trained_once_an_epoch(policy)
    assert [(status.epoch, status.step) for status in statuses] == [(0, 1), (0, 2), (1, 3), (1, 4)]
    assert [(row["epoch"], row["batch"], row["num_groups"]) for row in metrics(folder)] == [
        (0, 0, 3),
        (0, 1, 1),
        (1, 2, 3),
        (1, 3, 1),
    ]
    text = capfd.readouterr().err
    assert "epoch 1/2, rows 1 to 3: reward 0.5000" in text and "epoch 2/2, rows 4 to 4: reward" in text
    metadata = [trajectory["metadata"] for body in policy.trained for trajectory in body["groups"][0]["trajectories"]]
    assert [(entry["epoch"], entry["batch"]) for entry in metadata[::2]] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert not await art.finetune.run(make_file(finetuning__rows_per_step=3)), "complete already"


async def test_without_it_no_file_knows_of_it(policy: PolicyServer, folder: Path, make_file: MakeFile) -> None:
    await art.finetune.run(make_file(finetuning__validation={"dataset": "rows.json"}))
    for file in (folder / "out").glob("*.json*"):
        assert '"batch"' not in file.read_text(), file
    assert '"batch"' not in json.dumps(policy.trained)


@pytest.mark.parametrize("num_asked", range(1, 25, 2))
async def test_a_killed_run_continues_at_its_step(policy: PolicyServer, make_file: MakeFile, num_asked: int) -> None:
    """With three answers to a question the rewards of each row differ, whichever answer is asked for again."""
    file = make_file(
        finetuning__rows_per_step=3, eval__general__max_concurrency=1, trajectory_builders__b__num_generations=3
    )
    await run_until(policy, file, num_asked)
    await art.finetune.run(file)
    assert len(policy.asked) == 24 + 1, "only the answer that was in flight is asked for again"
    assert_each_row_is_trained_once_an_epoch(policy)


# --- sampling ahead -----------------------------------------------------------------------------------------------

AHEAD = {"finetuning__rows_per_step": 3, "finetuning__sample_ahead": True}


async def test_the_next_rows_are_sampled_while_a_step_trains(policy: PolicyServer, make_file: MakeFile) -> None:
    """No train call but the last is answered before all questions of the next step are asked."""
    numbers_asked = iter([8, 14, 16])
    train, answer = policy.train, policy.answer
    waiting: dict[int, asyncio.Event] = {}
    """What is set when so many questions were asked."""

    def count(question: str, number: int) -> str:
        for least, has_asked in waiting.items():
            if len(policy.asked) >= least:
                has_asked.set()
        return answer(question, number)

    def answer_later(request: Request, model: str) -> Answer:
        least = next(numbers_asked, 0)
        has_asked = waiting[least] = asyncio.Event()
        if len(policy.asked) >= least:
            has_asked.set()
        return replace(train(request, model), after=has_asked)

    policy.answer, policy.train = count, answer_later  # type: ignore[method-assign]
    await art.finetune.run(make_file(**AHEAD))
    assert_each_row_is_trained_once_an_epoch(policy)


@pytest.mark.parametrize("num_asked", range(1, 25, 2))
async def test_a_killed_run_that_samples_ahead_trains_each_row_once(
    policy: PolicyServer, make_file: MakeFile, num_asked: int
) -> None:
    """Two batches can have answers in flight, which are asked for again."""
    file = make_file(**AHEAD, eval__general__max_concurrency=1, trajectory_builders__b__num_generations=3)
    await run_until(policy, file, num_asked)
    await art.finetune.run(file)
    assert len(policy.asked) <= 24 + 2
    assert_each_row_is_trained_once_an_epoch(policy)


async def test_what_was_sampled_ahead_is_given_up_when_the_model_has_moved(
    policy: PolicyServer, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    file = make_file(**AHEAD, eval__general__max_concurrency=1)
    await run_until(policy, file, 10)  # of the second epoch
    assert [body["expected_step"] for body in policy.trained] == [0, 1]
    policy.steps["demo/agent"] = 1  # somebody has rolled back
    await art.finetune.run(file)
    assert "they were sampled for step 2, and the model is at step 1" in capfd.readouterr().err
    assert [body["expected_step"] for body in policy.trained] == [0, 1, 1, 2]


async def test_other_rows_for_each_step_are_another_run(make_file: MakeFile) -> None:
    await art.finetune.run(make_file(finetuning__rows_per_step=3))
    for other in (2, None):
        with pytest.raises(WrongInput, match="rows_per_step"):
            await art.finetune.run(make_file(finetuning__rows_per_step=other))
    with pytest.raises(WrongInput, match="2 are done in the folder, 1 here"):
        await art.finetune.run(make_file(finetuning__rows_per_step=3, finetuning__num_epochs=1))
    assert len(await art.finetune.run(make_file(finetuning__rows_per_step=3, finetuning__num_epochs=3))) == 2


async def test_validations_and_curriculum_count_in_rows(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    curriculum = {"enabled": True, "initial_percentile": 0.5, "expansion_interval": 0.5, "increment_percentile": 0.5}
    file = make_file(
        finetuning__rows_per_step=1,
        finetuning__num_epochs=1,
        finetuning__validation={"dataset": "rows.json", "interval": 0.5},
        finetuning__curriculum_learning=curriculum,
    )
    await art.finetune.run(file)
    assert [(row["epoch"], row["batch"], row["step"]) for row in validations(folder)] == [
        (0, 0, 0),
        (0, 2, 2),
        (1, 4, 4),
    ]
    assert [row["curriculum_percentile"] for row in metrics(folder)] == [0.5, 0.5, 1.0, 1.0]


# --- early stopping ---------------------------------------------------------------------------------------------------

STALLED = [
    ([], 1, False),
    ([0.5], 1, False),
    ([0.5, 0.6], 1, False),
    ([0.5, 0.5], 1, True),
    ([0.5, 0.4, 0.6], 2, False),
    ([0.5, 0.7, 0.6, None, 0.7], 2, True),
    ([0.5, 0.7, None, None], 1, False),
    ([0.5, 0.4, 0.3], None, False),
]


@pytest.mark.parametrize(("rewards", "patience", "expected"), STALLED)
def test_a_run_has_stalled(rewards: list[float | None], patience: int | None, expected: bool) -> None:
    rows = [ValidationRow(epoch=number, avg_reward=reward) for number, reward in enumerate(rewards)]
    assert has_stalled(rows, patience) is expected


async def test_a_run_without_a_better_validation_ends_and_names_its_best_step(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "val.json").write_text(json.dumps([{"question": "held out", "answer": "yes"}]))
    good = {1, 5}  # validations
    policy.answer = lambda question, number: (
        "yes" if question == "held out" and number in good else ("no", "yes")[number % 2 and question != "held out"]
    )
    kept = [{"step": step, "created_at": 0.0, "size_bytes": 1, "is_best": step == 1} for step in range(4)]
    policy.on("GET", "/api/models/demo/agent/checkpoints", Answer(body={"checkpoints": kept}))
    file = make_file(
        finetuning__num_epochs=9, finetuning__validation={"dataset": "val.json", "interval": 1, "patience": 2}
    )
    assert len(await art.finetune.run(file)) == 3
    text = capfd.readouterr().err
    assert "the last 2 validations were not better" in text
    last = text.splitlines()[-1]
    assert last == "the best step is 1 (validation 1.0000), kept as demo/agent@1 and demo/agent@best"
    told = [line for line in text.splitlines() if line.startswith("validation ")]
    rewards = zip(("before epoch 1", "after epoch 1", "after epoch 2", "after epoch 3"), (0, 1, 0, 0), strict=True)
    ends = [f"{when}: reward {reward} (no interval from 1 row)" for when, reward in rewards]
    assert told == [f"validation (1 held-out row) {end}" for end in ends]
    assert "the run ends. Not decided: the intervals of the best validation and of the last overlap (n=1)" in text
    assert [row["avg_reward"] for row in validations(folder)] == [0.0, 1.0, 0.0, 0.0]
    assert not await art.finetune.run(file), "what has stopped stays so"
    assert len(await art.finetune.run(file, {"finetuning.validation.patience": 4})) == 2


# --- the file -----------------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "finetuning.curriculum_learning.rank: on_expansion is of whole epochs": {
        "finetuning__rows_per_step": 2,
        "finetuning__curriculum_learning": {"enabled": True, "rank": "on_expansion"},
    },
    "finetuning.curriculum_learning.rank: on_expansion decides the next rows after a step": {
        "finetuning__sample_ahead": True,
        "finetuning__curriculum_learning": {"enabled": True, "rank": "on_expansion"},
    },
    "finetuning.validation.patience: needs validations": {"finetuning__validation": {"patience": 2}},
    "finetuning.rows_per_step: must be greater than or equal to 1": {"finetuning__rows_per_step": 0},
    "finetuning.trackers[0]: there is no tracker 'wandbb': use": {"finetuning__trackers": ["wandbb"]},
    "finetuning.trackers: must be a valid list": {"finetuning__trackers": {"wandb": {"api_key": "x"}}},
    "warmup_steps: must be greater than or equal to 0": {"trainer_adapters__a__training": {"warmup_steps": -1}},
    "training: overlong='soft_penalty' needs": {
        "trainer_adapters__a__training": {"schedule": "cosine", "overlong": "soft_penalty"}
    },
}


@pytest.mark.parametrize("problem", REFUSED)
async def test_a_wrong_value_is_one_sentence(policy: PolicyServer, make_file: MakeFile, problem: str) -> None:
    with pytest.raises(WrongInput) as refused:
        await art.finetune.run(make_file(**REFUSED[problem]))
    (sentence,) = refused.value.problems
    assert problem in sentence
    assert not policy.requests


SCHEDULES: list[tuple[dict[str, Any], int]] = [
    ({}, 4),
    ({"passes": 2, "batch_size": 2}, 16),
    ({"mini_batches": 3}, 12),
    ({"schedule_steps": 7}, 7),
]


@pytest.mark.parametrize(("training", "num_steps"), SCHEDULES)
async def test_a_cosine_ends_with_the_run(
    policy: PolicyServer, make_file: MakeFile, training: dict[str, Any], num_steps: int
) -> None:
    training = {"schedule": "cosine", "warmup_steps": 1, **training}
    await art.finetune.run(make_file(finetuning__rows_per_step=3, trainer_adapters__a__training=training))
    assert {body["config"]["schedule_steps"] for body in policy.trained} == {num_steps}


async def test_a_run_of_a_trained_model_has_a_schedule_from_its_own_beginning(
    policy: PolicyServer, make_file: MakeFile
) -> None:
    policy.steps["demo/agent"], policy.optimizer_steps = 9, 36
    file = make_file(trainer_adapters__a__training={"schedule": "cosine", "warmup_steps": 1})
    await art.finetune.run(file, {"finetuning.num_epochs": 1})
    policy.optimizer_steps = 37
    await art.finetune.run(file, {"finetuning.num_epochs": 2})
    assert [body["config"]["schedule_begins"] for body in policy.trained] == [36, 36]


async def test_a_schedule_begins_where_the_file_says(policy: PolicyServer, make_file: MakeFile) -> None:
    policy.steps["demo/agent"], policy.optimizer_steps = 9, 36
    training = {"schedule": "cosine", "schedule_steps": 50, "schedule_begins": 0}
    await art.finetune.run(make_file(trainer_adapters__a__training=training))
    assert {body["config"].get("schedule_begins", 0) for body in policy.trained} == {0}


async def test_of_equal_validations_the_earliest_is_named(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "val.json").write_text(json.dumps([{"question": "held out", "answer": "maybe"}]))
    policy.best_step = 0
    await art.finetune.run(make_file(finetuning__validation={"dataset": "val.json", "interval": 1}))
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("the best step is 0 (validation 0.0000), kept as demo/agent@0")


def written_by_tensorboard(folder: Path) -> bytes:
    (file,) = folder.glob("**/tensorboard/demo/agent/*")
    return file.read_bytes()


async def test_a_tracker_of_the_file_gets_the_steps(folder: Path, make_file: MakeFile) -> None:
    pytest.importorskip("tensorboard")
    file = make_file(finetuning__trackers=["tensorboard"])
    await art.finetune.run(file)
    assert b"loss/corrected_token_fraction" in written_by_tensorboard(folder), "the metrics of the train call"
    assert len(await art.finetune.run(file, {"finetuning.trackers": [], "finetuning.num_epochs": 3})) == 1


# --- cut answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_cut", "share"), [(True, 1.0), (False, 0.0)])
async def test_the_remedy_is_told_once_where_most_answers_are_cut(
    policy: PolicyServer, make_file: MakeFile, capfd: pytest.CaptureFixture[str], is_cut: bool, share: float
) -> None:
    policy.finish_reason = "length" if is_cut else "stop"
    await art.finetune.run(make_file(finetuning__rows_per_step=2))
    text = capfd.readouterr().err
    assert text.count("raise max_tokens of the agent's requests") == is_cut
    assert text.count("the token limit cut 4 of 4 answers") == 4 * is_cut
    assert {body["metrics"]["epoch/cut"] for body in policy.logged} == {share}
