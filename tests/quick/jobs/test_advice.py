"""Advice in a job's report: what was seen in the groups that teach nothing, and in the rewards of earlier steps."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import art
from art_protocol.wire import TrainConfig, TrajectoryGroupBody
from art_server.jobs.advice import advise
from art_server.jobs.batch_signs import BatchSigns, signs_of
from art_server.ledger.records import Record
from art_server.shared.trainer_messages import (
    Batch,
    SampledSpan,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
)
from tests.makers.resolving import LIMITS, bare, record, resolve, sources
from tests.quick.jobs.simulated_run import SimulatedRun
from tests.quick.server.served import sample_group, serving

MORE = "more rollouts"


def advice(
    answers: Sequence[Record],
    rewards: Sequence[float],
    **config: Any,
) -> list[str]:
    """The notes about equal groups, each of a trajectory for each answer."""
    by_id = {stored.choice_id: stored for stored in answers}
    trajectories = [
        {"messages_and_choices": [bare(stored.choice_id)], "reward": reward}
        for stored, reward in zip(answers, rewards, strict=True)
    ]
    group = TrajectoryGroupBody.model_validate({"trajectories": trajectories})
    known = sources(find_record=by_id.get)
    report = resolve([group], TrainConfig(**config), "p/a", known, LIMITS).report
    return [note for note in report.notes if "tokens were sampled with" not in note]


def answer(number: int, tokens: list[int], logprob: float = -0.5, step: int = 0, **sampling: Any) -> Record:
    plain = record(f"c-{number}", [1], tokens)
    request = dataclasses.replace(plain.request, step=step)
    return dataclasses.replace(plain, request=request, logprobs=[logprob] * len(tokens), sampling=sampling)


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


SAME = {"answers": lambda number: [7, 7, 7]}


@pytest.mark.parametrize(
    ("rewards", "earlier", "is_solved"),
    [
        ([1.0], [], True),
        ([0.0], [], False),
        ([0.5], [], False),
        ([0.5], [[0.0, 0.5]], True),
        ([0.5], [[0.0, 1.0]], False),
        ([0.5], [[0.5]], False),
        ([0.0], [[-1.0]], True),
        ([10.0], [[3.0, 10.0]], True),
    ],
)
@pytest.mark.parametrize("answers", [{}, SAME], ids=["different", "the same"])
def test_rewards_that_are_all_the_highest_are_no_fault(
    rewards: list[float], earlier: list[list[float]], is_solved: bool, answers: dict[str, Any]
) -> None:
    """Whatever the answers: a solved task has equal ones."""
    (note,) = notes_of(batch(1, rewards, **answers), [batch(0, before) for before in earlier])
    told = f"8 of 8 groups: all rewards are {rewards[0]:g}, the highest so far: these prompts seem solved"
    assert note.startswith(told) is is_solved and ("seed" in note) is (bool(answers) and not is_solved)


def test_solved_prompts_are_told_from_those_without_any_reward() -> None:
    groups = [*batch(1, [1.0], PROMPTS[:3]), *batch(1, [0.0], PROMPTS[3:])]
    solved, equal = notes_of([group.model_copy(update={"number": n}) for n, group in enumerate(groups)], [])
    assert solved.startswith("3 of 8 groups: all rewards are 1,") and equal.startswith(
        "5 of 8 groups: the answers differ"
    )


def test_a_group_of_one_trajectory_is_named() -> None:
    (note,) = advice([answer(0, [2])], [1.0])
    assert "one trajectory" in note and MORE not in note


PROMPTS = [[1, number] for number in range(8)]
"""Each is one group's."""


def batch(
    step: int,
    rewards: Sequence[float],
    prompts: Sequence[list[int]] = PROMPTS,
    *,
    answers: Callable[[int], list[int]] = lambda number: [10 + number % 50, 3],
    logprob: float = -0.5,
    is_cut: bool = False,
) -> list[TrainableGroup]:
    """Four rollouts of each prompt, which earn `rewards` in turn."""
    number = itertools.count()
    groups: list[TrainableGroup] = []
    for index, prompt in enumerate(prompts):
        trajectories: list[TrainableTrajectory] = []
        for _ in range(4):
            k = next(number)
            tokens = answers(k)
            sequence = TokenSequence(
                token_ids=[*prompt, *tokens],
                logprobs=[None] * len(prompt) + [logprob] * len(tokens),
                spans=[SampledSpan(start=len(prompt), stop=len(prompt) + len(tokens), step=step)],
                truncated=is_cut,
            )
            trajectories.append(TrainableTrajectory(reward=rewards[k % len(rewards)], sequences=[sequence]))
        groups.append(TrainableGroup(trajectories=trajectories, number=index))
    return groups


def signs(groups: Sequence[TrainableGroup]) -> BatchSigns:
    step = groups[0].trajectories[0].sequences[0].spans[0].step
    batch_signs = signs_of(Batch(groups=list(groups)), {step: 1})
    assert batch_signs is not None
    return batch_signs


def notes_of(groups: Sequence[TrainableGroup], earlier: Sequence[Sequence[TrainableGroup]]) -> list[str]:
    """The advice about a batch after earlier ones."""
    of_groups = [(group, len({trajectory.reward for trajectory in group.trajectories}) == 1) for group in groups]
    past = [signs(before) for before in earlier]
    return advise(
        of_groups,
        copied=(),
        is_greedy=False,
        compares_group=True,
        signs=signs(groups),
        learning_rate=1.0,
        past=lambda: past,
    )


def test_a_fall_on_the_same_prompts_names_the_step_to_go_back_to() -> None:
    (note,) = notes_of(batch(1, [0.0]), [batch(0, [0.0, 1.0])])
    assert "32 rollouts" in note and "was 0.5, and is 0" in note and "rollback(0)" in note
    assert "learning_rate than 1.0" in note and MORE not in note
    earlier = [batch(2, [1.0, 0.0]), batch(5, [1.0, 1.0, 0.0]), batch(7, [0.0] * 7 + [1.0]), batch(9, [0.0])]
    (note,) = notes_of(batch(9, [0.0]), earlier)
    assert "rollback(5)" in note, "the last step whose answers were good"


OTHERS = [[2, number] for number in range(8)]


@pytest.mark.parametrize(
    ("earlier", "groups"),
    [
        ([], batch(1, [0.0])),
        ([batch(0, [1.0])], batch(1, [0.0], OTHERS)),
        ([batch(0, [1.0])], batch(1, [0.0], [*PROMPTS[:3], *OTHERS[:5]])),
        ([batch(0, [0.5])], batch(1, [0.5])),
        ([batch(0, [-3.0])], batch(1, [-1.0])),
        ([batch(1, [1.0])], batch(1, [0.0])),
        ([batch(0, [0.0] * 12 + [1.0, 0.0, 0.0, 0.0])], batch(1, [0.0])),
        ([batch(0, [1.0] * 8 + [0.0] * 24)], batch(1, [0.0] * 8 + [1.0] * 8 + [0.0] * 16)),
    ],
    ids=["first", "other prompts", "few the same", "equal", "better", "own step", "rare rewards", "one for another"],
)
def test_no_step_is_named_where_no_prompts_fell(
    earlier: list[list[TrainableGroup]], groups: list[TrainableGroup]
) -> None:
    """Other prompts can be harder, and a policy may unlearn few questions while it learns others."""
    notes = notes_of(groups, earlier)
    assert "rollback" not in "".join(notes) and MORE in notes[-1]


def same(number: int) -> list[int]:
    return [7, 7, 7]


@pytest.mark.parametrize(
    ("collapsed", "words"),
    [
        (batch(3, [0.0], OTHERS, answers=same, logprob=-0.0001), "100% of the answers are the same one"),
        (
            batch(3, [0.0], OTHERS, is_cut=True, logprob=-0.0001),
            "100% of the answers are cut at their length limit (0%)",
        ),
        (batch(3, [0.0], OTHERS, answers=lambda _: [4]), "an answer has 1 tokens on average (8)"),
        (batch(3, [0.0], OTHERS, logprob=-6.0), "the probability of a sampled token is 0.0025 (0.61)"),
    ],
    ids=["one answer", "endless", "empty", "noise"],
)
def test_answers_that_collapsed_are_told_to_go_back_whatever_the_prompts(
    collapsed: list[TrainableGroup], words: str
) -> None:
    good = batch(2, [1.0, 0.0], answers=lambda number: [number, *range(7)])
    notes = notes_of(collapsed, [good])
    assert words in notes[0] and "rollback(2)" in notes[0] and "same prompts" not in notes[0]
    assert all("rollback" not in note for note in notes[1:])
    (note,) = notes_of(batch(3, [0.0], OTHERS, answers=lambda number: [number, *range(7)]), [good])
    assert "rollback" not in note, "the mean fell, and the answers are as before"


@pytest.mark.parametrize("changes", [{"is_cut": True}, {"answers": lambda number: [number, 3]}], ids=["long", "short"])
def test_other_prompts_may_have_answers_of_another_length(changes: dict[str, Any]) -> None:
    """Seed 22 of `scripts/bench/alarms`: five of six questions were sums, whose answers art/tiny does not end."""
    good = batch(2, [1.0, 0.0], answers=lambda number: [number, *range(7)])
    notes = notes_of(batch(3, [0.0], OTHERS, **changes), [good])
    assert all("rollback" not in note for note in notes)
    second = notes_of(batch(4, [0.0], OTHERS, **changes), [good, batch(3, [0.0], OTHERS, **changes)])
    assert "the answers collapsed" in second[0] and "rollback(2)" in second[0], "two batches in a row are no chance"


def test_batches_of_opposite_lengths_are_no_collapse() -> None:
    good = batch(2, [1.0, 0.0], answers=lambda number: [number, *range(7)])
    shorter = batch(3, [0.0], OTHERS, answers=lambda number: [number, 3])
    longer = batch(4, [0.0], OTHERS, answers=lambda number: [number, *range(7)], is_cut=True)
    notes = notes_of(longer, [good, shorter])
    assert all("rollback" not in note for note in notes)


def test_a_policy_that_always_answered_alike_did_not_collapse() -> None:
    alike = {"answers": same, "logprob": -0.0001}
    notes = notes_of(batch(3, [0.0], OTHERS, **alike), [batch(2, [1.0], **alike)])
    assert all("rollback" not in note for note in notes)


def test_demonstrations_have_no_signs() -> None:
    assert signs_of(Batch(groups=batch(0, [1.0])), {}) is None


@pytest.mark.parametrize("seed", range(4))
def test_honest_runs_of_small_batches_are_never_told_that_their_policy_broke(seed: int) -> None:
    """Fifty runs a seed: six random questions a step, of four kinds, with eight rollouts, as newcomers have them."""
    for run in range(50):
        simulated = SimulatedRun(random.Random(1000 * seed + run))
        notes = [note for _ in range(15) for note in simulated.step()]
        assert not [note for note in notes if "rollback" in note]


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_breaks_is_told_so_in_the_next_batch(seed: int) -> None:
    """Its twelve questions have been asked before, and more than a third of the answers were right."""
    simulated = SimulatedRun(random.Random(seed), num_questions=12, has_parts=False)
    simulated.learning_rate = 1.0
    while sum(batch.rewards.mean - 1 / 3 for batch in simulated.past) < 1:
        simulated.step()
    simulated.logits = dict.fromkeys(simulated.logits, -20.0)
    assert any("rollback" in note for _ in range(2) for note in simulated.step())


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
    assert any("was 0.95, and is 0 " in note and "rollback(0)" in note for note in notes), notes


def test_single_answers_are_no_flaw_where_rewards_are_compared_over_the_batch() -> None:
    by_id = {f"c-{number}": answer(number, [number + 2]) for number in range(3)}

    def notes(*rewards: float) -> list[str]:
        groups = [
            TrajectoryGroupBody.model_validate(
                {"trajectories": [{"messages_and_choices": [bare(choice)], "reward": reward}]}
            )
            for choice, reward in zip(by_id, rewards, strict=True)
        ]
        config = TrainConfig(baseline="none", scaling="batch_std")
        report = resolve(groups, config, "p/a", sources(find_record=by_id.get), LIMITS).report
        return [note for note in report.notes if "tokens were sampled with" not in note]

    assert notes(0.0, 1.0, 0.0) == []
    (note,) = notes(1.0, 1.0, 1.0)
    assert note.startswith("3 of 3 groups: the rewards of all answers are equal")
