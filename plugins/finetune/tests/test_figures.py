"""What a run says about itself: how many were trained, cut answers, files of JSON; LoRA, parameters and early stops."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import art
import art.finetune
from art.finetune import FinetuneError
from art.finetune.runs import prepare
from plugins.finetune.tests.policy_server import PolicyServer
from tests.fakes.server import Answer

pytestmark = pytest.mark.anyio

MakeFile = Callable[..., dict[str, Any]]


def epochs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "training_metrics.jsonl").read_text().splitlines()]


def half_equal(question: str, number: int) -> str:
    return "yes" if question in ("question 0", "question 1") else ("yes", "no")[number % 2]


async def test_groups_with_equal_rewards_are_not_counted_as_trained(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    policy.answer = half_equal
    await art.finetune.run(make_file(finetuning__num_epochs=1))
    (row,) = epochs(folder)
    assert (row["filtered_trajectories"], row["filtered_groups"], row["num_without_signal"]) == (4, 2, 2)
    assert (row["avg_reward"], row["filtered_avg_reward"], row["filtered_min_reward"]) == (0.75, 0.5, 0.0)
    assert "4 of 8 trajectories trained" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("training", "num_trained"),
    [({"beta": 0.1}, 8), ({"entropy_bonus": 0.1}, 8), ({"baseline": "none", "scaling": "batch_std"}, 8), ({}, 4)],
)
async def test_what_is_trained_depends_on_the_loss(
    policy: PolicyServer, folder: Path, make_file: MakeFile, training: dict[str, Any], num_trained: int
) -> None:
    policy.answer = half_equal
    await art.finetune.run(make_file(finetuning__num_epochs=1, trainer_adapters__a__training=training))
    assert epochs(folder)[0]["filtered_trajectories"] == num_trained


async def test_the_servers_count_of_what_was_trained_is_the_runs(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    policy.report = {"num_trajectories": 8, "num_trajectories_trained": 3, "num_groups": 4, "num_groups_trained": 2}
    await art.finetune.run(make_file(finetuning__num_epochs=1))
    (row,) = epochs(folder)
    assert (row["filtered_trajectories"], row["filtered_groups"]) == (3, 2)
    assert "3 of 8 trajectories trained" in capfd.readouterr().err


async def test_answers_that_the_token_limit_cut_are_counted(
    policy: PolicyServer, folder: Path, make_file: MakeFile, capfd: pytest.CaptureFixture[str]
) -> None:
    policy.finish_reason = "length"
    await art.finetune.run(make_file(finetuning__num_epochs=1))
    assert epochs(folder)[0]["num_cut"] == 8
    assert "the token limit cut 8 of 8 answers" in capfd.readouterr().err


async def test_files_are_json_also_with_one_row(folder: Path, make_file: MakeFile) -> None:
    (folder / "one.json").write_text(json.dumps([{"question": "q", "answer": "yes"}]))
    file = make_file(finetuning__validation={"dataset": "one.json"})
    await art.finetune.run(file)
    await art.finetune.evaluate(file, baseline="0")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for written in (folder / "out").glob("*.json*"):
        for text in written.read_text().splitlines() if written.suffix == ".jsonl" else [written.read_text()]:
            json.loads(text, parse_constant=refuse)
    figures = json.loads((folder / "out" / "eval.json").read_text())
    assert figures["reward"]["standard_error"] is None and figures["reward"]["interval"] == [None, None]


@pytest.mark.parametrize("reward", [math.nan, None])
async def test_a_builders_reward_that_is_no_number_fails_the_rollout(
    policy: PolicyServer, folder: Path, make_file: MakeFile, reward: float | None
) -> None:
    (folder / "builder.py").write_text(
        "from math import nan\nimport art.finetune\n"
        "class Builder(art.finetune.ArtTrajectoryBuilder):\n"
        f"    async def compute_reward(self, trajectory, meta):\n        return {reward}\n"
    )
    with pytest.raises(FinetuneError, match="compute_reward returned"):
        await art.finetune.run(make_file(trajectory_builders__b___type="builder.py:Builder"))
    assert not policy.trained


async def test_the_lora_of_a_new_model_can_be_set(policy: PolicyServer, make_file: MakeFile) -> None:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}
    file = make_file(trainer_adapters__a__backend__lora=lora)
    await art.finetune.run(file)
    (registered,) = policy.sent("POST", "/api/models")
    assert registered.json()["lora"] == lora
    error = {"message": "model 'demo/agent' has a LoRA of rank 4", "code": "lora_differs", "param": "lora"}
    policy.on("POST", "/api/models", Answer(409, {"error": error}))
    overrides = {"trainer_adapters.a.backend.lora.rank": 16, "finetuning.num_epochs": 3}
    with pytest.raises(FinetuneError, match=r"rank 4.* Set another trainer_adapters\.a\.backend\.name"):
        await art.finetune.run(file, overrides)


LLMS = {"policy": {"_type": "openai", "model_name": "agent", "temperature": 0.3, "top_k": 5, "stop": "."}}


@pytest.mark.parametrize("has_llms", [True, False])
async def test_parameters_that_a_workflow_does_not_see_are_named(
    make_file: MakeFile, capfd: pytest.CaptureFixture[str], has_llms: bool
) -> None:
    code = f"""
        async def asks(question{", llms" if has_llms else ""}):
            return await answer(question)
    """
    await art.finetune.run(make_file(code, llms=LLMS, workflow___type="agent.py:asks"))
    assert ("without effect here: llms.policy.top_k, llms.policy.stop:" in capfd.readouterr().err) is not has_llms


async def test_variables_have_types_in_fields_that_the_harness_does_not_know(
    make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    for name, value in {"T": "0.5", "N": "12", "B": "false", "S": "a text", "K": "123", "E": ""}.items():
        monkeypatch.setenv(name, value)
    fields = {"temperature": "${T}", "n": ["${N}", "${S}"], "inner": {"stop": "${B}"}, "none": "${E}"}
    policy = {"_type": "openai", "model_name": "${K}", "api_key": "${K}", **fields}
    config = prepare(make_file(llms={"policy": policy}, eval__general__max_concurrency="${N}")).config
    llm = config.llms["policy"]
    assert llm.fields() == {"temperature": 0.5, "n": [12, "a text"], "inner": {"stop": False}, "none": ""}
    assert (llm.model_name, llm.api_key, config.eval.general.max_concurrency) == ("123", "123", 12)
    sections = [f"{name}: {json.dumps(section)}" for name, section in make_file().items() if name != "workflow"]
    workflow = ["workflow:", "  _type: agent.py:answer", "  port: ${N}", '  label: "${N}"']
    (folder / "file.yml").write_text("\n".join([*sections, *workflow]))
    assert prepare(folder / "file.yml").config.workflow.fields() == {"port": 12, "label": "12"}
    await art.finetune.run(folder / "file.yml", {"trainer_adapters.a.backend.name": "${K}"})
    kept = YAML(typ="safe").load(folder / "out" / "config.yml")
    assert kept["workflow"] == {"_type": "agent.py:answer", "port": 12, "label": "12"}
    assert kept["trainer_adapters"]["a"]["backend"]["name"] == "123"


async def test_a_run_that_stops_early_validates_at_its_intervals_only(
    policy: PolicyServer, folder: Path, make_file: MakeFile
) -> None:
    (folder / "stopping.py").write_text(
        "import art.finetune\n"
        "class Stopping(art.finetune.ArtTrainer):\n"
        "    def is_done(self):\n        return len(self.context.folder.state.epochs) == 3\n"
    )
    file = make_file(
        trainers__t___type="stopping.py:Stopping",
        finetuning__num_epochs=5,
        finetuning__validation={"dataset": "rows.json", "interval": 4},
    )
    assert len(await art.finetune.run(file)) == 3
    assert not await art.finetune.run(file), "what has stopped goes on nowhere"
    validations = json.loads((folder / "out" / "validation_history.json").read_text())
    assert [row["epoch"] for row in validations] == [0, 3]
