"""Advice in a job's report: what was seen in the groups that teach nothing, and in the rewards of earlier steps."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import art
from art_protocol.wire import TrainConfig, TrajectoryGroupBody
from art_server.ledger.records import Record
from tests.quick.server.served import sample_group, serving
from tests.resolving import LIMITS, bare, record, resolve, sources

MORE = "more rollouts"


def advice(
    answers: Sequence[Record],
    rewards: Sequence[float],
    past: Mapping[int, float] | None = None,
    num_groups: int = 1,
    **config: Any,
) -> list[str]:
    """The notes about equal groups, each of a trajectory for each answer."""
    found = {each.choice_id: each for each in answers}
    trajectories = [
        {"messages_and_choices": [bare(each.choice_id)], "reward": reward}
        for each, reward in zip(answers, rewards, strict=True)
    ]
    group = TrajectoryGroupBody.model_validate({"trajectories": trajectories})
    known = sources(find_record=found.get)
    groups = [group] * num_groups
    report = resolve(groups, TrainConfig(**config), "p/a", known, LIMITS, lambda: past or {}).report
    return [note for note in report.notes if "tokens were sampled with" not in note]


def answer(number: int, tokens: list[int], logprob: float = -0.5, step: int = 0, **sampling: Any) -> Record:
    made = record(f"c-{number}", [1], tokens)
    request = dataclasses.replace(made.request, step=step)
    return dataclasses.replace(made, request=request, logprobs=[logprob] * len(tokens), sampling=sampling)


def test_different_answers_with_equal_rewards_need_more_rollouts() -> None:
    (note,) = advice([answer(0, [2]), answer(1, [3])], [0.0, 0.0])
    assert note.startswith("1 of 1 groups") and MORE in note
    assert advice([answer(0, [2]), answer(1, [3])], [0.0, 1.0]) == []


@pytest.mark.parametrize("rewards", [(0.0, 0.0), (0.0, 1.0)])
def test_equal_answers_have_their_cause_and_need_no_more_rollouts(rewards: tuple[float, float]) -> None:
    def same(*answers: Record) -> str:
        (note,) = advice(answers, rewards)
        assert MORE not in note
        return note

    assert "temperature 0" in same(*(answer(k, [2], temperature=0.0) for k in range(2)))
    assert "call the model once" in same(*[answer(0, [2])] * 2).lower()
    assert "0.99" in same(*(answer(k, [2, 3], -0.001) for k in range(2)))
    assert "seed" in same(*(answer(k, [2, 3]) for k in range(2)))


def test_a_group_of_one_trajectory_is_named() -> None:
    (note,) = advice([answer(0, [2])], [1.0])
    assert "one trajectory" in note and MORE not in note


BROKEN = [answer(k, [2, k], step=1) for k in range(32)]


def test_a_reward_that_fell_names_the_step_to_go_back_to() -> None:
    (note,) = advice(BROKEN, [0.0] * 32, {0: 0.53}, learning_rate=1.0)
    assert "0.53 with the answers of step 0" in note and "rollback(0)" in note and "learning_rate than 1.0" in note
    assert MORE not in note
    later = [dataclasses.replace(each, request=dataclasses.replace(each.request, step=9)) for each in BROKEN]
    (note,) = advice(later, [0.0] * 32, {2: 0.6, 5: 0.55, 7: 0.1, 9: 0.0})
    assert "rollback(5)" in note, "the last step whose answers were good"


@pytest.mark.parametrize(
    ("past", "rewards"),
    [
        ({}, [0.0] * 32),
        ({0: 0.05}, [0.0] * 32),
        ({0: 0.5}, [0.5] * 32),
        ({0: -3.0}, [-1.0] * 32),
        ({1: 1.0}, [0.0] * 32),
    ],
)
def test_no_step_is_named_where_none_was_better(past: dict[int, float], rewards: list[float]) -> None:
    """A small fall can be chance, and the answers' own step is none to go back to."""
    (note,) = advice(BROKEN, rewards, past)
    assert "rollback" not in note and MORE in note


def test_a_broken_policy_whose_answers_are_equal_is_told_to_go_back() -> None:
    same = [answer(k, [2], -0.0001, step=3) for k in range(16)]
    (note,) = advice(same, [0.0] * 16, {2: 0.9})
    assert "rollback(2)" in note


@pytest.mark.anyio
async def test_the_rewards_of_a_model_s_steps_are_known(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        model = art.TrainableModel(name="agent", project="demo", base_model="base")
        await model.register(art.Backend(served.url))

        async def train(*rewards: float) -> list[str]:
            trajectories: list[art.Trajectory] = []
            while len(trajectories) < len(rewards):
                trajectories += (await sample_group(model)).trajectories
            for trajectory, reward in zip(trajectories, rewards, strict=True):
                trajectory.reward = reward
            return (await model.train([art.TrajectoryGroup(trajectories)])).report.notes

        await train(*[1.0] * 19, 0.0)
        notes = await train(*[0.0] * 20)
        await model.backend().close()
    assert any("step 0" in note and "rollback(0)" in note for note in notes), notes
