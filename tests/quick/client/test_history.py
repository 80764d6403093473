import pytest

from art_protocol.history import history_row, merged_row, trajectory_metrics
from art_protocol.wire import TrajectoryGroupBody


def group(rewards: list[float], **more: object) -> TrajectoryGroupBody:
    trajectories = [{"messages_and_choices": [], "reward": r, "metrics": {"won": r > 0}} for r in rewards]
    return TrajectoryGroupBody.model_validate({"trajectories": trajectories, **more})


def test_means_by_hand() -> None:
    groups = [group([0.0, 2.0], exceptions=[{"type": "E", "message": "m"}], metrics={"size": 2}), group([1.0])]
    metrics = trajectory_metrics(groups, "val")
    assert metrics == {
        "val/reward": pytest.approx(1.0),
        "val/reward_std_dev": pytest.approx(1.0),
        "val/exception_rate": pytest.approx(0.25),
        "val/won": pytest.approx(2 / 3),
        "val/group_size": pytest.approx(2.0),
    }


def test_nothing_gives_no_row() -> None:
    assert trajectory_metrics([], "val") == {}


def test_a_row_keeps_the_time_of_its_step() -> None:
    row, later = history_row(1, {"a": 1.0, "b": 1.0}, "then"), history_row(1, {"b": 2.0}, "now")
    assert merged_row(row, later) == history_row(1, {"a": 1.0, "b": 2.0}, "then")
    row.pop("recorded_at")
    assert merged_row(row, later)["recorded_at"] == "now"
