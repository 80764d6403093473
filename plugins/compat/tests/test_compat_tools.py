"""ART's names and keywords of `art.utils`, `art.mcp` and `art.retry`, each called for its effect."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import art
from art.mcp import (
    GeneratedScenario,
    GeneratedScenarioCollection,
    MCPResource,
    MCPTool,
)
from art.mcp.generate_scenarios import preview_scenarios  # type: ignore[import]  # an alias
from art.types import Choice
from art.utils import get_model_step, iterate_dataset, strip_logprobs
from art.utils.get_repo_root_path import get_repo_root_path
from art.utils.get_trajectory_messages import get_trajectory_messages
from art.utils.iterate_dataset import DatasetBatch
from art.utils.litellm import convert_litellm_choice_to_openai
from art.utils.logging import dim, err, info, ok, step, warn
from art.utils.output_dirs import (
    get_default_art_path,
    get_model_dir,
    get_models_dir,
    get_output_dir_from_model_properties,
    get_step_checkpoint_dir,
    get_trajectories_dir,
    get_trajectories_split_dir,
)
from art.utils.s3 import pull_model_from_s3
from art.utils.sft import (
    SFTChunk,
    create_sft_dataset_iterator,
)
from art.utils.trajectory_logging import (
    deserialize_trajectory_groups,
    read_trajectory_groups_parquet,
    serialize_trajectory_groups,
    trajectory_group_to_dict,
    trajectory_to_dict,
    write_trajectory_groups_parquet,
)

pytestmark = pytest.mark.anyio


def make_trajectory(text: str, reward: float = 0.0) -> art.Trajectory:
    messages: Any = [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]
    return art.Trajectory(messages_and_choices=messages, reward=reward, metrics={"won": reward > 0})


# --- loops ------------------------------------------------------------------------------------------------------------


def test_every_keyword_of_iterate_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    batches = list(
        iterate_dataset(dataset=list("abc"), groups_per_step=2, num_epochs=2, initial_step=1, use_tqdm=False)
    )
    assert all(isinstance(batch, DatasetBatch) for batch in batches)
    assert [(batch.step, batch.epoch, batch.epoch_step) for batch in batches] == [
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert sorted(batches[1].items + batches[2].items) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


# --- supervised data --------------------------------------------------------------------------------------------------


def test_every_keyword_of_supervised_data(capsys: pytest.CaptureFixture[str]) -> None:
    data = [make_trajectory(str(number)) for number in range(6)]
    chunks = list(
        create_sft_dataset_iterator(
            trajectories=data,
            chunk_size=1,
            epochs=2,
            batch_size=3,
            peak_lr=1.0,
            schedule_type="constant",
            warmup_ratio=0.5,
            shuffle=False,
            seed=1,
            initial_step=1,
            show_progress=False,
        )
    )
    assert [(chunk.step, chunk.epoch, chunk.epoch_step) for chunk in chunks] == [
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert isinstance(chunks[0], SFTChunk) and chunks[0].trajectories == data[3:]
    assert [chunk.config.learning_rate for chunk in chunks] == [[1.0]] * 3
    assert capsys.readouterr().err == ""


# --- files ------------------------------------------------------------------------------------------------------------


def test_folders_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    assert get_repo_root_path() == str(tmp_path)
    assert get_default_art_path() == str(tmp_path / ".art")
    root = str(tmp_path / "art")
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    assert get_models_dir(project_name="demo", art_path=root) == f"{root}/demo/models"
    folder = get_model_dir(model=model, art_path=root)
    assert folder == f"{root}/demo/models/agent"
    assert folder == get_output_dir_from_model_properties(project="demo", name="agent", art_path=root)
    assert get_trajectories_dir(model_output_dir=folder) == f"{folder}/trajectories"
    of_split = get_trajectories_split_dir(model_output_dir=folder, split="val")
    assert of_split == f"{folder}/trajectories/val"
    Path(get_step_checkpoint_dir(model_output_dir=folder, step=12)).mkdir(parents=True)
    assert get_model_step(model=model, art_path=root) == 12


async def test_a_model_s_folder_comes_from_a_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    monkeypatch.delenv("BACKUP_BUCKET", raising=False)
    there = tmp_path / "bucket" / "runs" / "p" / "models" / "a"
    for name in ("history.jsonl", "checkpoints/0001/x", "checkpoints/0002/x", "trajectories/val/0"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text(name)
    here = tmp_path / "art" / "p" / "models" / "a"
    here.mkdir(parents=True)
    (here / "old").touch()

    async def pull(**options: Any) -> list[str]:
        folder = await pull_model_from_s3(
            model_name="a",
            project="p",
            s3_bucket=f"file://{tmp_path}/bucket",
            prefix="runs",
            art_path=str(tmp_path / "art"),
            **options,
        )
        assert folder == str(here)
        files = [file for file in here.rglob("*") if file.is_file()]
        return sorted(str(file.relative_to(here)) for file in files)

    assert await pull(exclude=["checkpoints"]) == ["history.jsonl", "old", "trajectories/val/0"]
    others = ["history.jsonl", "old", "trajectories/val/0"]
    assert await pull(delete=True, step=2, verbose=True) == ["checkpoints/0002/x", *others]
    assert capsys.readouterr().out == "checkpoints/0002/x\n"
    with pytest.raises(FileNotFoundError, match="checkpoints/0009"):
        await pull(delete=True, step=9)
    assert (here / "old").exists(), "nothing is deleted for a bucket that has nothing"
    assert await pull(delete=True, exclude=["checkpoints"]) == [
        "checkpoints/0002/x",
        "history.jsonl",
        "trajectories/val/0",
    ]
    with pytest.raises(ValueError, match="s3_bucket"):
        await pull_model_from_s3("a", "p")


async def test_rollouts_come_from_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    pytest.importorskip("polars", reason="polars is not installed")
    from art.utils.benchmarking.load_trajectories import (
        load_trajectories,
        pull_model_trajectories,
    )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BACKUP_BUCKET", f"file://{tmp_path}/bucket")
    model = art.Model(name="a", project="p", base_path=str(tmp_path / "bucket"))
    await model.log([make_trajectory("q", 0.5)])
    await pull_model_trajectories(model=model)
    assert (await load_trajectories("p"))["reward"].to_list() == [0.5]


def test_groups_as_texts_and_files(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="polars is not installed")
    group = art.TrajectoryGroup([make_trajectory("q", 0.5)], metadata={"task": 7})
    text = serialize_trajectory_groups(trajectory_groups=[group])
    (read,) = deserialize_trajectory_groups(serialized=text)
    assert read.metadata == {"task": 7} and read.trajectories[0].reward == 0.5
    row = trajectory_group_to_dict(trajectory_group=group)
    assert row["trajectories"] == [trajectory_to_dict(trajectory=group.trajectories[0])]
    file = tmp_path / "groups.parquet"
    write_trajectory_groups_parquet(trajectory_groups=[group], path=file)
    assert read_trajectory_groups_parquet(path=file)[0].trajectories[0].reward == 0.5


async def test_tables_and_charts_by_keyword(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pl = pytest.importorskip("polars", reason="polars is not installed")
    pytest.importorskip("matplotlib").use("agg")
    from art.utils.benchmarking.aggregate_trajectories import (
        load_aggregated_trajectories,
        load_latest_metrics,
    )
    from art.utils.benchmarking.charts import (
        percentage_comparison_bar_chart,
        training_progress_chart,
    )
    from art.utils.benchmarking.filter_model_split import filter_rename_model_split
    from art.utils.benchmarking.load_trajectories import load_trajectories
    from art.utils.benchmarking.types import BenchmarkModelKey

    for name, rewards in (("mine", (0.25, 1.0)), ("gpt", (0.5,))):
        model = art.Model(name=name, project="p", base_path=str(tmp_path))
        for number, reward in enumerate(rewards):
            await model.log([make_trajectory("q", reward)], split="val", step=number)
    path = str(tmp_path)
    df = await load_trajectories(project_name="p", models=["mine"], debug=True, art_path=path)
    assert df["reward"].to_list() == [0.25, 1.0] and "Loading" in capsys.readouterr().err
    table = await load_aggregated_trajectories(project_name="p", models=["mine"], metrics=["won"], art_path=path)
    assert table["reward"].to_list() == [0.25, 1.0] and "metric_won" in table.columns
    newest = await load_latest_metrics(project_name="p", models=["mine"], split="val", metrics=[], art_path=path)
    assert newest.select("step", "reward").rows() == [(1, 1.0)]
    key = BenchmarkModelKey(name="mine", display_name="Mine", split="val")
    assert set(filter_rename_model_split(df=df, models=[key])["model"]) == {"Mine"}
    whole = await load_trajectories("p", art_path=path)
    axes = training_progress_chart(
        df=whole,
        metric_name="reward",
        models=[key, "gpt"],
        title="Progress",
        x_label="Steps",
        y_label="Reward",
        perfect_score=1.0,
        legend_loc="upper left",
    ).axes[0]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        "Progress",
        "Steps",
        "Reward",
    )
    assert {"Mine", "gpt"} <= {line.get_label() for line in axes.get_lines()}
    assert [text.get_text() for text in axes.texts] == ["Perfect score"]
    bars = percentage_comparison_bar_chart(
        df=whole,
        metric_name="reward",
        models=[key],
        title="Now",
        y_label="Percent",
        perfect_score=1.0,
        num_decimals=1,
    ).axes[0]
    assert (bars.get_title(), bars.get_ylabel()) == ("Now", "Percent")
    assert [text.get_text() for text in bars.texts] == ["Perfect score", "100.0%"]
    assert pl.DataFrame is type(df)


# --- texts ------------------------------------------------------------------------------------------------------------


def test_lines_for_notebooks(capsys: pytest.CaptureFixture[str]) -> None:
    for function in (info, step, ok, warn, err):
        function(msg="3 scenarios")
    dim(msg="quiet")
    lines = capsys.readouterr().out.splitlines()
    words = ("INFO", "STEP", "OK", "WARN", "ERR")
    assert all(word in line and "3 scenarios" in line for word, line in zip(words, lines, strict=False))
    assert lines[-1] == "\x1b[2mquiet\x1b[0m"


def test_answers_of_other_libraries() -> None:
    message = {"role": "assistant", "content": "hi"}
    litellm_choice: Any = SimpleNamespace(model_dump=lambda: {"index": 0, "finish_reason": "stop", "message": message})
    choice = convert_litellm_choice_to_openai(litellm_choice=litellm_choice)
    assert isinstance(choice, Choice)
    trajectory = art.Trajectory(messages_and_choices=[choice])
    assert get_trajectory_messages(trajectory=trajectory) == [message]
    assert strip_logprobs(obj={"logprobs": 1, "x": 2}) == {"x": 2}


# --- MCP --------------------------------------------------------------------------------------------------------------


def test_every_name_of_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    tool = MCPTool(name="find", description="d", parameters={"type": "object"})
    assert MCPTool.from_dict(data=tool.to_dict()) == tool
    assert tool.to_dict() == {"name": "find", "description": "d", "parameters": {"type": "object"}}
    resource = MCPResource(uri="mail://1", name="inbox", description="d", mime_type="text/plain")
    assert MCPResource.from_dict(data=resource.to_dict()) == resource
    assert resource.mime_type == "text/plain" and resource.uri == "mail://1"
    scenario = GeneratedScenario(task="find the letter", difficulty=2)
    assert GeneratedScenario.from_dict(data=scenario.to_dict()) == scenario
    assert scenario.preview(max_length=4) == "find…" and scenario.difficulty == 2
    both = GeneratedScenarioCollection(scenarios=[scenario, GeneratedScenario("read", 4)])
    again = GeneratedScenarioCollection.from_dicts(data=both.to_dicts())
    text = again.to_json(indent=2)
    assert text.startswith("{\n  ")
    assert GeneratedScenarioCollection.from_json(json_str=text).to_dicts() == both.to_dicts()
    assert both.get_difficulty_distribution() == {2: 1, 4: 1}
    kept = both.filter_by_difficulty(min_difficulty=1, max_difficulty=3)
    assert [scenario.task for scenario in kept.shuffle()] == ["find the letter"]
    train, val = both.split(train_size=1)
    assert (len(train), val[0].task) == (1, "read") and both.get_summary()["total_scenarios"] == 2
    both.print_difficulty_distribution()
    both.preview(n=1, max_task_length=4)
    preview_scenarios(scenarios=both.to_dicts(), n=2)
    printed = capsys.readouterr().out
    assert "difficulty 4/5:   1" in printed and "1. find…" in printed and "2. read" in printed
