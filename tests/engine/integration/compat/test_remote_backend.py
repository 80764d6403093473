"""Our `TrainableModel` behind a remote backend of another's making, in the shape of NVIDIA's plugin."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import art
from tests.live import PROJECT, Server

pytestmark = pytest.mark.anyio

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "respond with yes, no, maybe"}]


class RemoteBackend:
    """Its own HTTP client, no key, ART's routes."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=None)

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(self, path: str, body: Any) -> Any:
        response = await self._http.post(path, json=body)
        response.raise_for_status()
        return response.json()

    def _dump(self, model: Any) -> dict[str, Any]:
        return {**model.model_dump(mode="json"), "config": None}

    async def register(self, model: Any) -> None:
        await self._post("/register", self._dump(model))

    async def _get_step(self, model: Any) -> int:
        return await self._post("/_get_step", self._dump(model))

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        body = {"model": self._dump(model), "steps_to_keep": steps_to_keep}
        await self._post("/_delete_checkpoint_files", body)

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]:
        body = {"model": self._dump(model), "config": dict(config) if config else None}
        base_url, api_key = await self._post("/_prepare_backend_for_training", body)
        return base_url, api_key

    async def _train_model(
        self, model: Any, groups: Any, config: Any, dev_config: Any, verbose: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        body = {
            "model": self._dump(model),
            "trajectory_groups": [group.model_dump(mode="json") for group in groups],
            "config": config.model_dump(mode="json"),
            "dev_config": dict(dev_config),
            "verbose": verbose,
        }
        async with self._http.stream("POST", "/_train_model", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.strip():
                    yield json.loads(line)


class AdapterConfig(BaseModel):
    init_args: art.dev.InitArgs | None = None
    engine_args: art.dev.EngineArgs | None = None
    training: art.dev.TrainerArgs | None = None


async def rollout(model: art.TrainableModel, reward: float) -> art.Trajectory:
    completion = await model.openai_client().chat.completions.create(
        model=model.name,
        messages=MESSAGES,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=1,
        max_tokens=8,
    )
    sampled = completion.choices[0]
    choice = art.types.Choice(
        index=0,
        finish_reason="stop",
        logprobs=sampled.logprobs,
        message={"role": "assistant", "content": sampled.message.content},  # type: ignore[arg-type]
    )
    trajectory = art.Trajectory(messages_and_choices=[*MESSAGES], reward=0.0)  # type: ignore[list-item]
    trajectory.messages_and_choices.append(choice)
    trajectory.reward = reward
    return trajectory


@pytest.fixture
async def remote(server: Server) -> AsyncIterator[RemoteBackend]:
    remote = RemoteBackend(server.url)
    yield remote
    await remote.close()


@pytest.fixture
async def model(remote: RemoteBackend) -> AsyncIterator[art.TrainableModel]:
    """As the plugin makes it from its YAML."""
    yaml = {"init_args": {"max_seq_length": 1024}, "training": {"learning_rate": "1e-4"}}
    config = AdapterConfig.model_validate(yaml)
    model = art.TrainableModel(
        name="remote-run",
        project=PROJECT,
        base_model="art/tiny",
        _internal_config=art.dev.InternalModelConfig(
            init_args=config.init_args,
            engine_args=config.engine_args,
            trainer_args=config.training,
        ),
    )
    await model.register(remote, _openai_client_config=None)
    yield model
    await model.close()


async def test_two_steps_over_a_remote_backend(server: Server, model: art.TrainableModel) -> None:
    assert model.inference_base_url == f"{server.inference_url}/v1"
    for step in (1, 2):
        await model.delete_checkpoints()
        trajectories = [await rollout(model, reward=float(number)) for number in range(4)]
        groups = [art.TrajectoryGroup(trajectories=trajectories)]
        trainer_args = model._internal_config.trainer_args
        train_config = art.types.TrainConfig(
            beta=getattr(trainer_args, "beta", 0),
            learning_rate=getattr(trainer_args, "learning_rate", 5e-5),
        )
        result = await model.train(trajectory_groups=groups, verbose=False, config=train_config)
        assert result.step == step
        assert result.metrics["loss/learning_rate"] == pytest.approx(1e-4)
        assert result.metrics["num_gradient_steps"] == 1.0
    empty = art.TrajectoryGroup(trajectories=[art.Trajectory(messages_and_choices=[*MESSAGES])])  # type: ignore[list-item]
    with pytest.raises(art.ArtJobError, match="'remote-run'"):
        await model.train(trajectory_groups=[empty], config=train_config)
