"""Records in a notebook: a `repr` of one line without secrets, and completion of names that do something."""

import pytest

import art
from art_protocol.display import counted

TRAJECTORY = art.Trajectory(
    messages_and_choices=[{"role": "user", "content": "hi" * 500}], reward=0.5, metrics={"won": 1}
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (art.TrainConfig(learning_rate=1e-4), "TrainConfig(learning_rate=0.0001)"),
        (
            art.TrainableModel(name="a", project="p", base_model="b", inference_api_key="secret"),
            "TrainableModel(name='a', project='p', base_model='b')",
        ),
        (art.TrajectoryGroup([TRAJECTORY, TRAJECTORY.model_copy()]), "TrajectoryGroup(rewards=[0.5, 0.5])"),
        (
            art.TrajectoryGroup([TRAJECTORY], exceptions=[ValueError("x")]),
            "TrajectoryGroup(rewards=[0.5], exceptions=1)",
        ),
        (
            art.TrainResult(2, {"train/reward": 0.5, "time/x": 1.0}),
            "TrainResult(step=2, metrics={'train/reward': 0.5} and 1 more)",
        ),
    ],
)
def test_a_repr_has_what_was_set(value: object, text: str) -> None:
    assert repr(value) == text


def test_a_long_trajectory_fits_a_line() -> None:
    text = repr(TRAJECTORY)
    assert len(text) < 160 and "reward=0.5" in text and "\n" not in text


async def _never() -> art.Trajectory:
    return TRAJECTORY


def test_a_group_that_was_not_awaited_says_how_many_are_pending() -> None:
    group = art.TrajectoryGroup([_never(), TRAJECTORY])
    assert repr(group) == "TrajectoryGroup(pending=2)"
    group.close()


def test_completion_leaves_out_what_does_nothing() -> None:
    names = set(dir(TRAJECTORY)) | set(dir(art.TrainableModel(name="a", project="p", base_model="b")))
    assert {"reward", "metrics", "train", "log", "model_dump_json"} <= names
    assert not names & {"dict", "json", "parse_obj", "entity", "final_policy_version"}


def test_a_number_has_its_noun() -> None:
    assert [counted(number, "engine") for number in (0, 1, 2)] == ["0 engines", "1 engine", "2 engines"]
    assert counted(2, "trajectory") == "2 trajectories"
