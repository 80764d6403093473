import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from art_protocol.wire import LogRequest, LoRAConfig, RegisterRequest
from art_server.errors import Conflict, InvalidInput, NotFound
from art_server.jobs.attempt import step_metrics
from art_server.store.registry import Registry, check_lora, check_name
from tests.quick.store.model_folders import commit, make_model
from tests.refusals import refused
from tests.waiting import PATIENCE_SECONDS


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


def test_a_provider_in_front_of_the_name_is_left_out(tmp_path: Path) -> None:
    """Frameworks such as Mirascope have names of the form PROVIDER/NAME."""
    make_model(tmp_path, "shop", "agent", steps=2)
    registry = Registry(tmp_path)
    for text in ("openai/shop/agent", "hosted_vllm/shop/agent@1"):
        assert registry.resolve(text, "art/tiny", None) == registry.resolve("shop/agent@1", "art/tiny", None)
    assert registry.resolve("openai/art/tiny", "art/tiny", None).model is None
    for text in ("openai/agent", "a/b/shop/agent", "/shop/agent", "openai/tiny"):
        with pytest.raises(NotFound):
            registry.resolve(text, "art/tiny", None)
    with pytest.raises(NotFound, match="'shop' is a project: write shop/NAME, or NAME alone"):
        registry.resolve("shop", "art/tiny", None)


def test_a_wrong_name_is_answered_with_the_one_that_was_meant_and_at_most_five(tmp_path: Path) -> None:
    for number in range(8):
        make_model(tmp_path, "p", f"agent-{number}")
    make_model(tmp_path, "p", "webnav")
    registry = Registry(tmp_path)
    with pytest.raises(NotFound) as refused:
        registry.resolve("webnva@3", "base", None)
    assert "did you mean 'p/webnav'?" in refused.value.message
    assert refused.value.message.count("agent-") == 4 and "4 more" in refused.value.message
    with pytest.raises(NotFound, match="Did you mean 'p/webnav'"):
        registry.get("p", "webnavv")
    with pytest.raises(NotFound) as refused:
        registry.get("q", "webnav")
    assert "p/webnav" not in refused.value.message, "another project's models are not named"


def test_a_bare_name_in_two_projects_asks_for_the_project(tmp_path: Path) -> None:
    make_model(tmp_path, "p", "a")
    make_model(tmp_path, "q", "a")
    registry = Registry(tmp_path)
    with pytest.raises(Conflict) as refused:
        registry.resolve("a", None, None)
    assert (refused.value.code, refused.value.param) == ("ambiguous_model", "model")
    model = registry.resolve("a", None, frozenset({"q"})).model
    assert model is not None and model.id == "q/a", "unique among what the key may see"


@pytest.mark.parametrize(
    ("project", "name", "param"),
    [("demo", "b", "project"), ("DEMO", "Agent", "project"), ("Demo", "agent", "name")],
)
def test_names_that_differ_by_case_only_are_refused(tmp_path: Path, project: str, name: str, param: str) -> None:
    make_model(tmp_path, "Demo", "Agent")
    registry = Registry(tmp_path)
    with pytest.raises(Conflict) as refused:
        registry.folder(project, name)
    assert (refused.value.code, refused.value.param) == ("name_differs_by_case", param)
    for other in (("Demo", "Agent"), ("Demo", "b"), ("other", "agent")):
        assert (registry.folder(*other).project, registry.folder(*other).name) == other


def test_projects_that_exist_in_both_cases_keep_working(tmp_path: Path) -> None:
    for project in ("Demo", "demo"):
        make_model(tmp_path, project, "a")
    assert Registry(tmp_path).folder("demo", "new").project == "demo"


def test_models_of_other_projects_are_not_even_named(tmp_path: Path) -> None:
    make_model(tmp_path, "secret", "a")
    with refused(NotFound, "unknown_model", "model") as caught:
        Registry(tmp_path).resolve("secret/a", None, frozenset({"mine"}))
    assert caught.value.message.count("secret") == 1, "the request's own"


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

    def have(best: int | None) -> list[int]:
        folder.prune_optimizer_state(best)
        return [step for step in folder.steps() if (folder.checkpoint_dir(step) / "optimizer.safetensors").exists()]

    assert have(1) == [1, 2, 3]
    commit(folder, 4)
    assert have(2) == [2, 3, 4], "the best step became another one"
    commit(folder, 5)
    assert have(None) == [4, 5]


def best(registry: Registry) -> int | None:
    return registry.resolve("p/a@best", "base", None).step


def test_best_names_the_best_step_after_each_log(tmp_path: Path) -> None:
    make_model(tmp_path, "p", "a", steps=4)
    registry = Registry(tmp_path)
    history = registry.get("p", "a").history
    history.add(1, {"train/reward": 0.9, "sampled_step": 0.0})
    assert best(registry) == 0
    history.add(1, {"val/reward": 0.5})
    assert best(registry) == 1, "val/reward counts, if the history has it"
    history.add(2, {"val/reward": 0.7})
    assert best(registry) == registry.resolve("a@best", "base", None).step == 2
    history.add(2, {"val/reward": 0.3})
    assert best(registry) == 1


def test_best_waits_for_no_change_and_is_never_older_than_the_last_one(tmp_path: Path) -> None:
    make_model(tmp_path, "p", "a", steps=3)
    registry = Registry(tmp_path)
    history = registry.get("p", "a").history
    history.add(1, {"val/reward": 0.5})
    may_end, has_begun = threading.Event(), threading.Event()

    def change() -> None:
        with registry.database.changes("a test"):
            history.add(2, {"val/reward": 0.7})
            has_begun.set()
            may_end.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=change)
    thread.start()
    assert has_begun.wait(PATIENCE_SECONDS)
    assert best(registry) == 1, "nothing is committed"
    assert thread.is_alive()
    may_end.set()
    thread.join()
    assert best(registry) == 2
    registry.database.close()


def test_best_is_a_kept_step_that_is_not_being_deleted(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=4)
    registry = Registry(tmp_path)
    model = registry.get("p", "a")
    for step, reward in ((0, 0.1), (1, 0.4), (2, 0.4), (3, 0.2), (9, 1.0)):
        model.history.add(step, {"val/reward": reward})
    assert best(registry) == model.history.best_step() == 1, "of equal ones the earlier"
    model.deleting.add(1)
    assert best(registry) == 2
    folder.remove_steps([2])
    assert best(registry) == 3


def test_best_without_a_metric_to_judge_by_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "p", "a", steps=2)
    registry = Registry(tmp_path)
    for metrics in ({}, {"val/accuracy": 1.0}):
        registry.get("p", "a").history.add(1, metrics)
        with pytest.raises(NotFound) as error:
            best(registry)
        assert (error.value.code, error.value.param) == ("unknown_step", "model")


def test_sampled_steps_as_metrics() -> None:
    assert step_metrics({}) == {}
    assert step_metrics({3: 10, 4: 90, 5: 1}) == {
        "sampled_step": 4.0,
        "sampled_step_min": 3.0,
        "sampled_step_max": 5.0,
    }


def test_another_adapter_shape_is_refused() -> None:
    assert check_lora(LoRAConfig(rank=4), None, "p/a") is None
    layers = [LoRAConfig(target_modules=names) for names in (["q_proj", "v_proj"], ["v_proj", "q_proj"], ["q_proj"])]
    assert check_lora(layers[0], layers[1], "p/a") is None
    with pytest.raises(Conflict):
        check_lora(layers[0], layers[2], "p/a")
    with pytest.raises(Conflict) as refused:
        check_lora(LoRAConfig(rank=4), LoRAConfig(rank=8), "p/a")
    assert (refused.value.code, refused.value.param) == ("lora_differs", "lora")
