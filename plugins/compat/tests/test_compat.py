"""What programs written for ART do that is not our own way: unknown fields, other names, models without a server."""

import asyncio
import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import art
from art_compat.internal_config import InternalSettings, with_defaults
from art_protocol.history import read_rows

pytestmark = pytest.mark.anyio

REGISTER = "/api/models"


class Scenario(BaseModel):
    difficulty: int = 1


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# --- unknown fields, other names --------------------------------------------------------------------------------------


def test_a_trajectory_takes_unknown_fields_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields: dict[str, Any] = {"messages_and_choices": [], "reward": 1.0, "scenario": Scenario()}
    trajectories = [art.Trajectory(**fields) for _ in range(3)]
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 3 and not hasattr(trajectories[0], "scenario")
    assert warnings_of(caplog) == ["Trajectory has no field 'scenario': its value is left out"]
    group = art.TrajectoryGroup(trajectories, benchmark="b")
    assert len(group) == 3 and group.trajectories[0] is trajectories[0]
    assert "TrajectoryGroup has no field 'benchmark'" in warnings_of(caplog)[1]


def test_a_configuration_takes_arts_own_fields_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, Any] = {"kl_penalty_coef": 0.1, "beta": 0.5}
    assert [art.TrainConfig(**fields) for _ in range(2)] == [art.TrainConfig(beta=0.5)] * 2
    assert warnings_of(caplog) == ["TrainConfig has no field 'kl_penalty_coef': its value is left out"]
    with pytest.raises(ValueError, match="here it is `beta`"):
        art.TrainConfig(kl_coef=0.1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="dropout"):
        art.LoRAConfig(lora_droput=0.1)  # type: ignore[call-arg]


def test_the_fields_of_a_subclass_are_its_own(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(art.Trajectory):
        scenario: Scenario

    assert Mine(scenario=Scenario(difficulty=3)).scenario.difficulty == 3
    assert warnings_of(caplog) == []


def test_an_adapter_has_the_names_of_peft_too(caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 32, "lora_dropout": 0.0}
    assert art.LoRAConfig(**fields) == art.LoRAConfig(rank=4, alpha=32)
    assert warnings_of(caplog) == ["LoRAConfig has no field 'lora_dropout': its value is left out"]
    model = art.TrainableModel(name="a", project="p", base_model="b", lora_config=art.LoRAConfig(rank=4))
    assert model.lora == model.lora_config == art.LoRAConfig(rank=4)


def test_models_have_a_type_of_configuration() -> None:
    model = art.Model[Scenario](name="a", project="p", config=Scenario(difficulty=2))
    assert model.config.difficulty == 2 and isinstance(model, art.Model)
    trained = art.TrainableModel[Scenario](name="a", project="p", base_model="b", config=Scenario(difficulty=3))
    assert trained.config.difficulty == 3 and isinstance(trained, art.TrainableModel)
    assert trained.model_copy(deep=True).config is not trained.config
    assert art.TrainableModel(name="a", project="p", base_model="b").config is None
    with pytest.raises(ValueError, match=r"config\['difficulty'\] is 'hard': Input should be a valid integer"):
        art.Model[Scenario](name="a", project="p", config={"difficulty": "hard"})  # type: ignore[arg-type]


def test_a_copied_group_has_lists_of_its_own() -> None:
    group = art.TrajectoryGroup([art.Trajectory(reward=1.0)], metadata={"a": 1}, logs=["x"])
    copied = copy.copy(group)
    copied.trajectories.append(art.Trajectory(reward=2.0))
    copied.metadata["b"] = 2
    copied.logs.append("y")
    copied.exceptions.append(art.TrajectoryGroup([ValueError()]).exceptions[0])
    assert (len(group), group.metadata, group.logs, group.exceptions) == (1, {"a": 1}, ["x"], [])
    assert copied.trajectories[0] is group.trajectories[0]


# --- models that no server keeps --------------------------------------------------------------------------------------


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def groups_of(*rewards: float) -> list[art.TrajectoryGroup]:
    return [art.TrajectoryGroup([art.Trajectory(reward=reward, metrics={"won": reward > 0})]) for reward in rewards]


async def test_a_prompted_model_is_logged_below_its_base_path(tmp_path: Path) -> None:
    model = art.Model(name="gpt", project="p", base_path=str(tmp_path))
    assert (await model.log(groups_of(0.0, 1.0), "val"))["val/reward"] == 0.5
    written = await model.log(groups_of(1.0), "test", metrics={"cost/usd": 0.5})
    assert written == {
        "test/reward": 1.0,
        "test/exception_rate": 0.0,
        "test/won": 1.0,
        "cost/usd": 0.5,
    }
    await model.log(groups_of(1.0), "val", step=3)
    folder = tmp_path / "p" / "models" / "gpt"
    first, later = read(folder)
    assert (first["step"], later["step"], later["training_step"]) == (0, 3, 3)
    assert first["val/reward"] == 0.5 and first["test/reward"] == 1.0, "one row for each step"
    groups = read_rows(folder / "trajectories" / "val" / "0000.jsonl.gz")
    assert [row["trajectories"][0]["reward"] for row in groups] == [0.0, 1.0]


async def test_rows_that_are_logged_at_a_time_are_all_kept(tmp_path: Path) -> None:
    model = art.Model(name="gpt", project="p", base_path=str(tmp_path))
    splits = ("val", "test")
    calls = [model.log(groups_of(1.0), split, step=step) for step in range(8) for split in splits]
    await asyncio.gather(*calls)
    rows = read(tmp_path / "p" / "models" / "gpt")
    assert sorted(row["step"] for row in rows) == list(range(8))
    assert all(row[f"{split}/reward"] == 1.0 for row in rows for split in splits)


async def test_a_model_that_is_not_registered_is_logged_too(tmp_path: Path) -> None:
    model = art.TrainableModel(name="a", project="p", base_model="b", base_path=str(tmp_path))
    await model.log([art.Trajectory(reward=1.0)])
    assert read(tmp_path / "p" / "models" / "a")[0]["val/reward"] == 1.0


async def test_only_a_server_writes_into_the_folder_of_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "p" / "models" / "a"
    folder.mkdir(parents=True)
    (folder / "model.json").write_text("{}")
    model = art.TrainableModel(name="a", project="p", base_model="b", base_path=str(tmp_path))
    with pytest.raises(ValueError, match="register"):
        await model.log(groups_of(1.0))
    assert not (folder / "history.jsonl").exists()


async def test_what_cannot_be_logged_leaves_no_file(tmp_path: Path) -> None:
    model = art.Model(name="a", project="p", base_path=str(tmp_path))
    with pytest.raises(ValueError, match="reward"):
        await model.log([art.Trajectory(reward=float("nan"))])
    assert not (tmp_path / "p").exists()


# --- ART's settings of engine, adapter and trainer --------------------------------------------------------------------


CONFIG: dict[str, Any] = {
    "init_args": {"max_seq_length": 2048, "load_in_4bit": True, "dtype": None},
    "engine_args": {"max_num_seqs": 8, "num_scheduler_steps": 4},
    "peft_args": art.dev.PeftArgs(r=4, lora_alpha=8),
    "trainer_args": {"max_grad_norm": 0.25, "learning_rate": 1e-3, "optim": "adamw"},
    "tinker_args": {"renderer": "x"},
}


async def test_the_internal_config_reaches_the_server(
    server: Any, answer: Any, backend: art.Backend, caplog: pytest.LogCaptureFixture
) -> None:
    note = "max_num_seqs=8 is not applied: the engine was started with 256"
    info = {"name": "agent", "project": "demo", "base_model": "art/tiny", "step": 0}
    info |= {"inference_name": "demo/agent", "lora": {"rank": 4, "alpha": 8}, "notes": [note]}
    server.on("POST", REGISTER, answer(body=info))
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    model._internal_config = art.dev.InternalModelConfig(CONFIG)
    await model.register(backend)
    (sent,) = [request.json() for request in server.sent("POST", REGISTER)]
    assert sent["engine_args"] == {
        "max_num_seqs": 8,
        "num_scheduler_steps": 4,
        "max_seq_length": 2048,
    }
    assert sent["lora"] == {"rank": 4, "alpha": 8.0, "target_modules": None}
    assert warnings_of(caplog) == [
        "register: _internal_config: tinker_args has no effect",
        "register: _internal_config: init_args.load_in_4bit has no effect",
        "register: _internal_config: trainer_args.optim has no effect",
        f"register: {note}",
    ]


async def test_trainer_args_are_defaults_of_train_calls(
    server: Any, answer: Any, model: art.TrainableModel, groups: list[art.TrajectoryGroup]
) -> None:
    done = {"event": "done", "job_id": "j", "step": 4}
    server.on("POST", "/api/models/demo/agent/train", answer(lines=[done]))
    model._internal_config = CONFIG
    await model.train(groups, art.TrainConfig(learning_rate=1e-4))
    await model.submit(groups, art.TrainConfig(learning_rate=1e-4))
    for request in server.sent("POST", "/api/models/demo/agent/train"):
        sent = request.json()["config"]
        assert (sent["learning_rate"], sent["max_grad_norm"]) == (1e-4, 0.25)


def test_an_option_that_sets_several_fields_replaces_none_that_a_call_sets() -> None:
    settings = InternalSettings(trainer_args={"ppo": True})
    config = with_defaults(art.TrainConfig(epsilon=0.05), settings)
    preset = with_defaults(art.TrainConfig(), settings)
    assert config.epsilon == 0.05 and preset.epsilon == 0.2
    assert config.clip == preset.clip


async def test_a_registration_without_settings_is_as_before(server: Any, model: art.TrainableModel) -> None:
    """An older server refuses fields that it does not know."""
    (sent,) = [request.json() for request in server.sent("POST", REGISTER)]
    assert sent.keys() == {"name", "project", "base_model", "lora"}


def test_a_backend_of_its_own_is_a_plain_context_too(tmp_path: Path) -> None:
    with art.LocalBackend(path=tmp_path) as backend:
        assert isinstance(backend, art.LocalBackend)
        assert not (tmp_path / "logs").exists(), "the server starts with the first model"
