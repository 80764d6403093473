"""Files of rollouts as tables, charts and groups, as ART's programs read them."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import art
from art.utils.trajectory_logging import (
    deserialize_trajectory_groups,
    read_trajectory_groups_parquet,
    serialize_trajectory_groups,
    write_trajectory_groups_parquet,
)

pl = pytest.importorskip("polars", reason="polars is not installed")
pytestmark = pytest.mark.anyio

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def choice(text: str) -> Choice:
    entry = {"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []}
    message = {"role": "assistant", "content": text, "tool_calls": [CALL]}
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": message,
            "logprobs": {"content": [entry], "refusal": None},
        }
    )


def group(*rewards: float) -> art.TrajectoryGroup:
    return art.TrajectoryGroup(
        [
            art.Trajectory(
                messages_and_choices=[
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    choice(f"{reward}"),
                ],
                reward=reward,
                metrics={"win": reward > 0.5},
                metadata={"seed": 1},
                logs=["started"],
            )
            for reward in rewards
        ],
        metadata={"task": "t"},
        metrics={"spread": 0.5},
        logs=["made"],
    )


async def logged(tmp_path: Path) -> str:
    """A project with a trained model (three steps of validation) and a prompted one."""
    for name, rewards in (("mine", (0.2, 0.4, 0.9)), ("gpt", (0.6,))):
        model = art.Model(name=name, project="p", base_path=str(tmp_path))
        for step, reward in enumerate(rewards):
            await model.log([group(reward, 0.0), group(reward)], split="val", step=step)
    return str(tmp_path)


async def test_rollouts_are_a_table(tmp_path: Path) -> None:
    from art.utils.benchmarking.load_trajectories import load_trajectories

    table = await load_trajectories("p", art_path=await logged(tmp_path))
    assert table.shape[0] == 12 and set(table["model"]) == {"mine", "gpt"}
    newest = table.filter((pl.col("model") == "mine") & (pl.col("step") == 2))
    assert newest["reward"].to_list() == [0.9, 0.0, 0.9]
    assert newest["metric_win"].to_list() == [1.0, 0.0, 1.0]
    assert newest["group_number"].n_unique() == 2 and newest["group_metric_spread"][0] == 0.5
    assert newest["metadata_seed"][0] == "1" and newest["group_metadata_task"][0] == "t"
    assert newest["logs"][0].to_list() == ["started"] and newest["group_logs"][0][0] == "made"
    user, answer = newest["messages"][0].to_list()
    assert json.loads(user["content"])[0]["text"] == "hi" and not user["trainable"]
    assert answer["trainable"] and answer["content"] == "0.9"
    assert answer["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    only = await load_trajectories("p", models=["gpt"], art_path=str(tmp_path))
    assert set(only["model"]) == {"gpt"}
    assert (await load_trajectories("nobody", art_path=str(tmp_path))).is_empty()


async def test_rollouts_of_arts_servers_are_in_the_table(tmp_path: Path) -> None:
    from art.utils.benchmarking.load_trajectories import load_trajectories

    folder = tmp_path / "p" / "models" / "a" / "trajectories" / "val"
    folder.mkdir(parents=True)
    (folder / "0003.jsonl").write_text(serialize_trajectory_groups([group(0.2, 0.4), group(0.9)]) + "\n")
    table = await load_trajectories("p", art_path=str(tmp_path))
    assert table["reward"].to_list() == [0.2, 0.4, 0.9] and set(table["step"]) == {3}


async def test_rollouts_are_summed_up_by_step(tmp_path: Path) -> None:
    from art.utils.benchmarking.aggregate_trajectories import (
        load_aggregated_trajectories,
        load_latest_metrics,
    )

    path = await logged(tmp_path)
    table = await load_aggregated_trajectories("p", metrics=["win"], art_path=path)
    assert table.columns == ["model", "split", "step", "reward", "metric_win", "reward_std_dev"]
    mine = table.filter(pl.col("model") == "mine")
    # By hand: the groups of step 2 have means 0.45 and 0.9, and deviations 0.9 / sqrt(2) and none.
    assert mine["reward"].to_list()[-1] == pytest.approx(0.675)
    assert mine["metric_win"].to_list()[-1] == pytest.approx(0.75)
    assert mine["reward_std_dev"].to_list()[-1] == pytest.approx(0.9 / 2**0.5)
    newest = await load_latest_metrics("p", art_path=path)
    assert newest.select("model", "step").rows() == [("gpt", 0), ("mine", 2)]


async def test_charts_show_the_means(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("agg")
    from art.utils.benchmarking.charts import (
        percentage_comparison_bar_chart,
        training_progress_chart,
    )
    from art.utils.benchmarking.load_trajectories import load_trajectories
    from art.utils.benchmarking.types import BenchmarkModelKey

    table = await load_trajectories("p", art_path=await logged(tmp_path))
    figure = training_progress_chart(table, "reward", perfect_score=1.0, y_label="Reward")
    lines: dict[Any, Any] = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines["mine"].get_ydata()) == pytest.approx([0.4 / 3, 0.8 / 3, 0.6])
    assert list(lines["gpt"].get_ydata()) == pytest.approx([0.4, 0.4])
    named = BenchmarkModelKey("mine", "Mine", "val")
    bars = percentage_comparison_bar_chart(table, "win", [named, "gpt"]).axes[0]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["Mine", "gpt"]
    assert [label.get_text() for label in bars.texts] == ["67%", "67%"]
    figure.savefig(tmp_path / "progress.png")
    with pytest.raises(ValueError, match="'loss'"):
        training_progress_chart(table, "loss")
    with pytest.raises(ValueError, match="models"):
        training_progress_chart(table, "reward", ["nobody"])


def same(one: art.TrajectoryGroup, other: art.TrajectoryGroup) -> bool:
    return one.model_dump(mode="json") == other.model_dump(mode="json")


def test_groups_go_through_parquet_with_their_log_probabilities(tmp_path: Path) -> None:
    groups, file = [group(0.2, 0.4), group(0.9)], tmp_path / "0001.parquet"
    write_trajectory_groups_parquet(groups, file)
    assert all(map(same, read_trajectory_groups_parquet(file), groups))
    table = pl.read_parquet(file)
    assert table["group_index"].to_list() == [0, 0, 1] and table["format_version"].unique()[0] == 2
    assert pl.read_parquet_metadata(file)["art.trajectory_parquet.version"] == "2"
    assert [message["trainable"] for message in table["messages"][0]] == [False, True]
    first = table.drop("trajectory_json", "group_json", "format_version")  # version 1
    first.write_parquet(tmp_path / "old.parquet")
    old = read_trajectory_groups_parquet(tmp_path / "old.parquet")
    assert [[t.reward for t in trajectories] for trajectories in old] == [[0.2, 0.4], [0.9]]
    message: Any = old[0].trajectories[0].messages_and_choices[1]
    assert message["tool_calls"] == [CALL] and old[0].trajectories[0].metrics == {"win": 0.0}


def test_groups_go_through_text_without_log_probabilities() -> None:
    text = serialize_trajectory_groups([group(0.2, 0.4)])
    assert "logprob" not in text
    (read,) = deserialize_trajectory_groups(text + "\n")
    assert read.metadata == {"task": "t"}
    answer: Any = read.trajectories[1].messages_and_choices[1]
    assert isinstance(answer, Choice) and answer.message.content == "0.4"
    with pytest.raises(json.JSONDecodeError):
        deserialize_trajectory_groups("{")
