import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from art_protocol.wire import LogRequest, LoRAConfig, RegisterRequest
from art_server.errors import Conflict, InvalidInput, NotFound
from art_server.jobs.metrics import step_metrics
from art_server.store.model_folder import CheckpointRecord, ModelFolder, ModelRecord
from art_server.store.registry import Registry, check_lora, check_name


def make_model(root: Path, project: str, name: str, steps: int = 1) -> ModelFolder:
    folder = ModelFolder(root, project, name)
    for step in range(steps):
        commit(folder, step)
    record = ModelRecord(name=name, project=project, base_model="art/tiny", lora=LoRAConfig())
    folder.create(record, root / "engine.log")
    return folder


def commit(folder: ModelFolder, step: int, job_id: str | None = None) -> None:
    temporary = folder.new_checkpoint_dir()
    (temporary / "optimizer.safetensors").write_bytes(b"state")
    folder.commit_checkpoint(temporary, CheckpointRecord(step=step, job_id=job_id))


def test_a_name_resolves_to_the_step_that_serves(tmp_path: Path) -> None:
    make_model(tmp_path, "p", "a", steps=3)
    registry = Registry(tmp_path)
    for text in ("a", "p/a"):
        policy = registry.resolve(text, "base", None)
        assert policy.model is not None and policy.model.id == "p/a" and policy.step == 2
    assert registry.resolve("p/a@1", "base", None).step == 1
    assert registry.resolve("p/a:step1", "base", None).step == 1, "as ART's programs write it"
    assert registry.resolve("base", "base", None).model is None
    assert registry.resolve("a", "base", None, only="p/a").model is not None
    for text in ("base", "b"):
        with pytest.raises(NotFound):
            registry.resolve(text, "base", None, only="p/a")


def test_a_bare_name_in_two_projects_asks_for_the_project(tmp_path: Path) -> None:
    make_model(tmp_path, "p", "a")
    make_model(tmp_path, "q", "a")
    registry = Registry(tmp_path)
    with pytest.raises(Conflict, match=r"several projects \(p, q\)"):
        registry.resolve("a", None, None)
    found = registry.resolve("a", None, frozenset({"q"})).model
    assert found is not None and found.id == "q/a", "unique among what the key may see"


@pytest.mark.parametrize(
    ("project", "name", "existing"),
    [
        ("demo", "b", "project 'Demo'"),
        ("DEMO", "Agent", "project 'Demo'"),
        ("Demo", "agent", "model 'Agent'"),
    ],
)
def test_names_that_differ_by_case_only_are_refused(
    tmp_path: Path, project: str, name: str, existing: str
) -> None:
    make_model(tmp_path, "Demo", "Agent")
    registry = Registry(tmp_path)
    with pytest.raises(Conflict, match=f"the existing {existing} by case only") as refused:
        registry.folder(project, name)
    assert refused.value.code == "name_differs_by_case"
    assert refused.value.param == ("project" if project != "Demo" else "name")
    for other in (("Demo", "Agent"), ("Demo", "b"), ("other", "agent")):
        assert (registry.folder(*other).project, registry.folder(*other).name) == other


def test_projects_that_exist_in_both_cases_keep_working(tmp_path: Path) -> None:
    for project in ("Demo", "demo"):
        make_model(tmp_path, project, "a")
    assert Registry(tmp_path).folder("demo", "new").project == "demo"


def test_models_of_other_projects_are_not_even_named(tmp_path: Path) -> None:
    make_model(tmp_path, "secret", "a")
    with pytest.raises(NotFound) as error:
        Registry(tmp_path).resolve("secret/a", None, frozenset({"mine"}))
    assert "known models: none" in error.value.message


@pytest.mark.parametrize("name", ["abc\n", "\nabc", "a b", "é", "a" * 129, "", ".", "..", "a/b"])
def test_a_name_is_nothing_but_a_name(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_name(name, "project")
    with pytest.raises(ValidationError):
        RegisterRequest(name=name, project="p", base_model="b")
    with pytest.raises(ValidationError):
        LogRequest(split=name)


@pytest.mark.parametrize("step", ["9", "x", "-1", "1" * 400, "1@2", "²", "٣", "0\n"])
def test_steps_that_are_not_there_are_refused(tmp_path: Path, step: str) -> None:
    make_model(tmp_path, "p", "a")
    with pytest.raises(NotFound):
        Registry(tmp_path).resolve(f"a@{step}", None, None)


@given(st.text())
def test_no_name_leaves_its_folder(name: str) -> None:
    try:
        check_name(name, "name")
    except InvalidInput as error:
        assert error.param == "name" and len(error.message) < 500
    else:
        path = Path("/root") / name / "models"
        assert path.resolve().parent.parent == Path("/root") and name not in (".", "..", ".server")


def test_a_restarted_registry_forgets_unfinished_checkpoints(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=2)
    folder.new_checkpoint_dir()
    model = Registry(tmp_path).get("p", "a")
    assert model.step == 1
    assert sorted(entry.name for entry in folder.checkpoints_dir.iterdir()) == ["0000", "0001"]


def test_optimizer_state_is_kept_for_the_newest_two_steps_and_the_best(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=4)

    def have() -> list[int]:
        folder.prune_optimizer_state()
        return [
            step
            for step in folder.steps()
            if (folder.checkpoint_dir(step) / "optimizer.safetensors").exists()
        ]

    folder.add_history(2, {"train/reward": 0.9, "sampled_step": 1.0})
    assert have() == [1, 2, 3]
    folder.add_history(3, {"train/reward": 0.95, "sampled_step": 2.0})
    commit(folder, 4)
    assert have() == [2, 3, 4], "the best step became another one"
    commit(folder, 5)
    assert have() == [2, 4, 5]


def test_the_best_step_is_the_highest_mean_among_kept_ones(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=4)
    for step, reward in ((0, 0.9), (1, 0.2), (1, 0.8), (2, 0.4), (9, 1.0)):
        folder.add_history(step, {"val/reward": reward})
    assert folder.best_step("val/reward") == 0
    folder.remove_steps([0, 2])
    assert folder.best_step("val/reward") == 1
    assert folder.best_step("val/other") is None


def best(registry: Registry) -> int | None:
    return registry.resolve("p/a@best", "base", None).step


def test_best_names_the_best_step_after_each_log(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=4)
    registry = Registry(tmp_path)
    folder.add_history(1, {"train/reward": 0.9, "sampled_step": 0.0})
    assert best(registry) == 0
    folder.add_history(1, {"val/reward": 0.5})
    assert best(registry) == 1, "val/reward counts, if the history has it"
    folder.add_history(2, {"val/reward": 0.7})
    assert best(registry) == registry.resolve("a@best", "base", None).step == 2
    size = (folder.path / "history.jsonl").stat().st_size
    folder.add_history(2, {"val/reward": 0.3})
    assert (folder.path / "history.jsonl").stat().st_size == size, "a file of the same size"
    assert best(registry) == 1


def test_best_is_a_kept_step_that_is_not_being_deleted(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=4)
    registry = Registry(tmp_path)
    for step, reward in ((0, 0.1), (1, 0.4), (2, 0.4), (3, 0.2), (9, 1.0)):
        folder.add_history(step, {"val/reward": reward})
    assert best(registry) == folder.best_step("val/reward") == 2, "of equal ones the later"
    registry.get("p", "a").deleting.add(2)
    assert best(registry) == 1
    folder.remove_steps([1])
    assert best(registry) == 3


def test_best_without_a_metric_to_judge_by_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=2)
    registry = Registry(tmp_path)
    for metrics in ({}, {"val/accuracy": 1.0}):
        if metrics:
            folder.add_history(1, metrics)
        with pytest.raises(
            NotFound, match=r"val/reward or train/reward.*for example p/a@1"
        ) as error:
            best(registry)
        assert error.value.code == "unknown_step"


def test_requests_for_the_best_step_do_not_read_the_history_again(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=2)
    registry = Registry(tmp_path)
    folder.add_history(1, {"val/reward": 0.5})
    assert best(registry) == 1
    history = folder.path / "history.jsonl"
    before = history.stat()
    history.write_bytes(b"x" * before.st_size)
    os.utime(history, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert best(registry) == 1
    os.utime(history, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(NotFound, match="no best step"):
        best(registry)


def test_a_job_s_row_is_written_once(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a")
    folder.add_history(1, {"train/reward": 1.0}, "job")
    folder.add_history(1, {"train/reward": 2.0}, "job")
    assert [row["train/reward"] for row in folder.history()] == [1.0]


def test_rows_of_one_step_merge(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a")
    folder.add_history(1, {"val/reward": 0.25})
    folder.add_history(1, {"train/reward": 1.0, "sampled_step": 0.0}, "job")
    folder.add_history(2, {"train/reward": 2.0}, "next")
    folder.add_history(1, {"val/reward": 0.5, "test/reward": 0.75})
    one, two = folder.history()
    assert (one["step"], one["job_id"]) == (1, "job") and two["step"] == 2
    rewards = [one[f"{split}/reward"] for split in ("val", "train", "test")]
    assert rewards == [0.5, 1.0, 0.75]


def test_the_best_training_reward_is_that_of_the_step_that_sampled_it(tmp_path: Path) -> None:
    """The rollouts that step 1 earned 0.9 with are trained into step 2."""
    folder = make_model(tmp_path, "p", "a", steps=4)
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.5)):
        folder.add_history(step, {"train/reward": reward, "sampled_step": step - 1.0})
    assert folder.best_step("train/reward") == 1


def test_sampled_steps_as_metrics() -> None:
    assert step_metrics({}) == {}
    assert step_metrics({3: 10, 4: 90, 5: 1}) == {
        "sampled_step": 4.0,
        "sampled_step_min": 3.0,
        "sampled_step_max": 5.0,
    }


def test_another_adapter_shape_is_refused() -> None:
    assert check_lora(LoRAConfig(rank=4), None, "p/a") is None
    with pytest.raises(Conflict, match="register another name"):
        check_lora(LoRAConfig(rank=4), LoRAConfig(rank=8), "p/a")
