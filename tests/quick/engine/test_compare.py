"""The engine scores a loaded step's probe before the step serves. The engine class is real, vLLM's answers are not."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from art_server.engine.device.owner import DeviceOwner
from art_server.engine.engine import AdapterRefused, Engine, PolicyDiffers
from art_server.process.background import Background
from art_server.process.place import Here
from art_server.process.progress import StartProgress
from art_server.settings import ServerConfig
from art_server.shared.same_policy import mismatch_limits
from art_server.shared.trainer_messages import Probe
from art_server.store.base_models import BaseModel
from tests.refusals import refused

pytestmark = pytest.mark.anyio

PROBE = Probe(
    token_ids=[5, 6, 7],
    logprobs=[-1.0, -2.01],
    base_logprobs=[-1.0, -2.0],
    rounding=0.01,
    factor=100,
    scaled_logprobs=[-1.0, -3.0],
)


class ScoringEngine(Engine):
    """vLLM is a dict: the alpha of each loaded adapter."""

    def __init__(self, folder: Path, limit: float | None = None):
        super().__init__(
            location=Here(device="cpu"),
            config=ServerConfig(path=folder),
            owner=DeviceOwner(),
            receiver=None,  # type: ignore[arg-type]
            is_busy=lambda: False,
            background=Background(),
            name="engine",
            progress=StartProgress(),
            changed=asyncio.Condition(),
            mismatch_limits_of=lambda _: mismatch_limits(("bfloat16", "float32"), limit=limit),
        )
        self.base = BaseModel("base", folder)
        self.state, self._run_dir = "ready", folder
        self.alphas: dict[str, float] = {}
        self.posts: list[str] = []
        self.alpha_factor, self.status = 1.0, 200

    async def _post(self, path: str, body: dict[str, Any] | None = None, *_: Any, **__: Any) -> tuple[int, str]:
        body = body or {}
        self.posts.append(path)
        if path == "/v1/load_lora_adapter":
            config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
            self.alphas[body["lora_name"]] = config["lora_alpha"] * self.alpha_factor
        elif path == "/v1/unload_lora_adapter":
            del self.alphas[body["lora_name"]]
        elif path == "/v1/completions":
            assert body["prompt"] == PROBE.token_ids
            effect = -0.01 * self.alphas[body["model"]] / 16
            scores = [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.0 + effect}}]
            text = json.dumps({"choices": [{"prompt_logprobs": scores}]})
            return self.status, text
        return 200, ""


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "0001"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    described = {"step": 1, "probe": PROBE.model_dump()}
    (folder / "checkpoint.json").write_text(json.dumps(described))
    return folder


async def test_a_step_serves_once_engine_and_trainer_agree(tmp_path: Path, step: Path) -> None:
    engine = ScoringEngine(tmp_path)
    await engine.try_load("p/a@1", step)
    assert engine.alphas == {"p/a@1": 16}, "the scaled adapter is unloaded"
    assert engine.posts.count("/v1/completions") == 2
    assert engine.holds("p/a@1")
    assert os.listdir(tmp_path) == ["0001"], "nothing is left on disk"


async def test_an_adapter_that_a_paused_engine_loaded_is_compared_before_it_serves(tmp_path: Path, step: Path) -> None:
    engine = ScoringEngine(tmp_path)
    await engine.load_paused("p/a@1", step)
    assert engine.posts == ["/v1/load_lora_adapter"] and not engine.holds("p/a@1")
    await engine.try_load("p/a@1", step)
    assert engine.posts.count("/v1/completions") == 2


async def test_another_alpha_does_not_serve_until_it_is_right(tmp_path: Path, step: Path) -> None:
    engine = ScoringEngine(tmp_path)
    engine.alpha_factor = 2.0
    for _ in range(2):  # each request for the step gets the error
        with refused(PolicyDiffers, "policy_differs") as raised:
            await engine.try_load("p/a@1", step)
        assert "2.00" in raised.value.message and not raised.value.retryable
        assert engine.loaded_adapters() == []
    engine.alpha_factor = 1.0
    await engine.try_load("p/a@1", step)
    assert engine.loaded_adapters() == ["p/a@1"] and engine.alphas == {"p/a@1": 16}


async def test_an_engine_that_cannot_score_refuses_the_adapter(tmp_path: Path, step: Path) -> None:
    engine = ScoringEngine(tmp_path)
    engine.status = 400
    with refused(AdapterRefused, "adapter_refused"):
        await engine.try_load("p/a@1", step)


async def test_a_step_without_a_probe_or_with_the_check_off_is_not_compared(tmp_path: Path, step: Path) -> None:
    engine = ScoringEngine(tmp_path, limit=0.0)
    engine.alpha_factor = 2.0
    await engine.try_load("p/a@1", step)
    skipped = PROBE.model_copy(update={"num_skipped": 1}).model_dump()
    for described in ({"step": 1}, {"step": 1, "probe": skipped}):
        (step / "checkpoint.json").write_text(json.dumps(described))
        engine = ScoringEngine(tmp_path)
        engine.alpha_factor = 2.0
        await engine.try_load("p/a@1", step)
        assert "/v1/completions" not in engine.posts
