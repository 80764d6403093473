"""Models on backends that are not ours, in the shape of NVIDIA's plugin."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

import art
from art_compat.third_party_backend import ThirdPartyBackend

pytestmark = pytest.mark.anyio


class Remote:
    """The five methods, and nothing else."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = rows
        self.calls: list[tuple[str, Any]] = []

    async def register(self, model: Any) -> None:
        self.calls.append(("register", model.model_dump(mode="json")))

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]:
        self.calls.append(("prepare", config))
        return "http://box:8000/v1", "default"

    async def _get_step(self, model: Any) -> int:
        return 7

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        self.calls.append(("delete", steps_to_keep))

    async def _train_model(
        self, model: Any, groups: Any, config: Any, dev_config: Any, verbose: bool
    ) -> AsyncIterator[dict[str, Any]]:
        body = [group.model_dump(mode="json") for group in groups]
        self.calls.append(("train", (body, config.model_dump(mode="json"), dict(dev_config))))
        for row in self.rows:
            yield row


async def make_model(remote: Remote, **more: Any) -> art.TrainableModel:
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny", **more)
    await model.register(remote, _openai_client_config=art.dev.OpenAIServerConfig(log_file="x"))
    return model


async def test_a_foreign_backend_registers_and_gives_the_address():
    trainer_args = art.dev.TrainerArgs(learning_rate=1e-5)
    settings = art.dev.InternalModelConfig(init_args=None, trainer_args=trainer_args)
    remote = Remote()
    assert isinstance(remote, ThirdPartyBackend) and not isinstance(art.Backend(), ThirdPartyBackend)
    model = await make_model(remote, _internal_config=settings)
    assert model.inference_base_url == "http://box:8000/v1"
    assert (model.get_inference_name(), model.get_inference_name(3)) == ("agent", "agent@3")
    assert await model.get_step() == 7
    registered = json.loads(json.dumps(remote.calls[0][1]))
    expected = {"init_args": None, "trainer_args": {"learning_rate": 1e-5}}
    assert registered["_internal_config"] == expected
    assert remote.calls[1] == ("prepare", {"log_file": "x"})


async def test_train_iterates_the_backend_and_averages(groups: list[art.TrajectoryGroup]):
    remote = Remote({"loss": 1, "num_gradient_steps": 2}, {"loss": 2.0, "only": 4})
    model = await make_model(remote)
    config = art.types.TrainConfig(beta=0, learning_rate=5e-05)
    result = await model.train(trajectory_groups=groups, verbose=False, config=config)
    assert result.step == 7
    assert result.metrics == {"loss": 1.5, "num_gradient_steps": 2.0, "only": 4.0}
    body, sent, dev_config = remote.calls[-1][1]
    assert len(body[0]["trajectories"]) == 2 and dev_config == {}
    assert (sent["learning_rate"], sent["beta"]) == (5e-05, 0.0)


async def test_a_failure_in_the_stream_is_raised(groups: list[art.TrajectoryGroup]):
    model = await make_model(Remote({"loss": 1.0}, {"error": "CUDA out of memory"}))
    with pytest.raises(art.ArtJobError, match="CUDA out of memory"):
        await model.train(groups)


async def test_only_the_newest_checkpoint_is_kept_there():
    remote = Remote()
    await (await make_model(remote)).delete_checkpoints()
    assert remote.calls[-1] == ("delete", [7])
