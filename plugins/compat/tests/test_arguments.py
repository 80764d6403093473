"""Arguments of ART's models and backends, and what they write."""

import logging
import subprocess
import sys
from typing import Any

import pytest

import art

pytestmark = pytest.mark.anyio

TRAIN, LOG = "/api/models/demo/agent/train", "/api/models/demo/agent/log"
DONE = {"event": "done", "job_id": "j", "step": 4, "metrics": {"loss/policy": 0.5}}


def make_model(**fields: Any) -> art.TrainableModel:
    return art.TrainableModel(name="agent", project="demo", base_model="art/tiny", **fields)


async def test_plain_model_has_no_history_on_the_server(server, backend, tmp_path):
    judge = art.Model(name="judge", project="demo", base_path=str(tmp_path))
    await judge.register(backend)
    await judge.log([art.Trajectory(reward=1.0)])
    assert not server.requests and (tmp_path / "demo/models/judge/history.jsonl").exists()


async def test_ignored_client_config_is_told(backend, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        model = make_model()
        await model.register(backend, _openai_client_config={"server_args": {}})
    assert "_openai_client_config is ignored" in caplog.text


async def test_costs_that_rollouts_count_are_in_the_row_of_their_step(server, answer, model):
    async def judged(model: art.TrainableModel, scenario: float) -> art.Trajectory:
        model.metrics_builder("eval").add_cost("judge", 0.25)
        return art.Trajectory(reward=scenario)

    server.on("POST", LOG, answer(body={"step": 3, "metrics": {}}))
    await art.evaluate(model, judged, [0.0, 1.0], step=3, baseline=0)
    rows = [request.json() for request in server.sent("POST", LOG)]
    assert {row["step"]: row["metrics"].get("costs/judge") for row in rows} == {3: 1.0, 0: None}


def test_dump_carries_the_internal_config_and_reads_it_again():
    config = {"trainer_args": {"learning_rate": 1e-5}}
    model = make_model(_internal_config=config)
    assert model._internal_config == config
    model._internal_config = {"init_args": None}
    dumped = model.model_dump(mode="json")
    assert dumped["_internal_config"] == {"init_args": None}
    again = art.TrainableModel.model_validate(dumped)
    assert again == model and again.model_dump() == model.model_dump()
    assert set(dumped) == {
        *("name", "project", "entity", "id", "run_id", "config", "trainable", "base_model", "lora"),
        *("inference_api_key", "inference_base_url", "inference_model_name"),
        *("base_path", "report_metrics", "run_name", "_internal_config"),
    }


async def test_groups_have_arts_name_too(server, answer, model, groups):
    server.on("POST", TRAIN, answer(lines=[DONE]))
    await model.train(trajectory_groups=groups, verbose=False, config=art.TrainConfig())
    (request,) = server.sent("POST", TRAIN)
    assert len(request.json()["groups"]) == len(groups)


IMPORTS = [
    "from art.utils import iterate_dataset as found",
    "from art.utils.iterate_dataset import iterate_dataset as found",
    "found = art.utils.iterate_dataset",
]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_names_of_art_work_in_every_order(order: tuple[int, ...]) -> None:
    lines = ["import art"]
    for index in order:
        lines += [IMPORTS[index], "assert found is art.iterate_dataset"]
    lines.append("assert art.utils.retry is art.retry")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


async def test_checkpoint_files_are_deleted_as_art_asks(server, answer, backend, model):
    path = "/api/models/demo/agent/checkpoints/delete"
    server.on("POST", path, answer(body={"kept": [2], "deleted": [1]}))
    await backend._delete_checkpoint_files(model, [2])
    (request,) = server.sent("POST", path)
    assert request.json() == {"best_metric": None, "keep": [2]}
