"""ART's settings and options, and what becomes of them."""

import copy
import json
import logging
import pickle
from typing import Any

import pytest
from pydantic import BaseModel

import art
from art_protocol.art_options import apply_options

pytestmark = pytest.mark.anyio


class Adapter(BaseModel):
    """As the plugin's configuration holds them."""

    training: art.dev.TrainerArgs | None = None
    engine: art.dev.EngineArgs | None = None


def test_settings_are_dictionaries_attributes_and_fields():
    options = {"training": {"learning_rate": "1e-6", "obsolete": [1]}, "engine": {"seed": 3}}
    adapter = Adapter.model_validate(options)  # a YAML reader takes 1e-6 for a text
    assert adapter.training is not None and adapter.engine is not None
    assert adapter.training.learning_rate == 1e-6 and adapter.training["obsolete"] == [1]
    assert getattr(adapter.training, "beta", 0.5) == 0.5 and adapter.training.get("beta") is None
    assert dict(adapter.engine) == {"seed": 3} and adapter.engine.seed == 3
    dumped = {"training": {"learning_rate": 1e-6, "obsolete": [1]}, "engine": {"seed": 3}}
    assert json.loads(adapter.model_dump_json()) == adapter.model_dump() == dumped
    assert Adapter.model_validate(adapter.model_dump()) == adapter
    assert Adapter(training=art.dev.TrainerArgs(beta=0.1)).training == {"beta": 0.1}
    copied = adapter.training.copy()
    copied.beta = 0.2
    assert copied["beta"] == 0.2 and "beta" not in adapter.training
    for again in (copy.deepcopy(copied), pickle.loads(pickle.dumps(copied))):
        assert again == copied and type(again) is art.dev.TrainerArgs
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = copied.nothing


def test_a_settings_value_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"training.learning_rate"):
        Adapter.model_validate({"training": {"learning_rate": "high"}})


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"learning_rate": 1e-4, "epsilon": None, "verbose": False}, {"learning_rate": 1e-4}),
        ({"ppo": True, "epsilon": 0.1}, {"clip": "two_sided", "epsilon": 0.1}),
        ({"loss_fn": "cispo"}, {"clip": "cispo", "epsilon": 1.0, "epsilon_high": 4.0}),
        ({"normalize_advantages": True, "scale_rewards": False}, {"scaling": "none"}),
        ({"importance_sampling_level": "geometric_average"}, {"ratio": "geometric"}),
        (
            {"kl_penalty_coef": 0.1, "beta": 0.0, "kl_penalty_source": "sample"},
            {"beta": 0.1, "kl_in": "advantage", "kl_estimator": "k1"},
        ),
        ({"kl_penalty_coef": 0.0, "beta": 0.2}, {"beta": 0.2}),
        ({"precalculate_logprobs": False}, {"ratio_to": "sampled", "correction": "off"}),
        ({"precalculate_logprobs": True}, {"ratio_to": "start", "correction": "off"}),
        (
            {"truncated_importance_sampling": 1.5, "precalculate_logprobs": True},
            {"ratio_to": "start", "correction": "truncate", "correction_high": 1.5},
        ),
    ],
)
def test_options_of_the_same_meaning_are_translated(options: dict[str, Any], fields: dict):
    assert apply_options(art.TrainConfig(), options) == (art.TrainConfig(**fields), [])


def test_options_without_their_like_are_named():
    options = {"kimi_k2_tau": 0.1, "mask_prob_ratio": False, "importance_sampling_level": ["token"]}
    config, ignored = apply_options(art.TrainConfig(), options)
    assert (config, ignored) == (art.TrainConfig(), ["kimi_k2_tau", "importance_sampling_level"])
    # ART skips it too: without log-probabilities of its own the trainer has nothing to weigh the sampler's with.
    cap = {"truncated_importance_sampling": 2.0}
    assert apply_options(art.TrainConfig(), cap) == (art.TrainConfig(), [*cap])


def test_options_win_over_what_a_preset_filled_in():
    config, _ = apply_options(art.TrainConfig(preset="dapo", learning_rate=1e-3), {"ppo": False})
    assert (config.clip, config.epsilon_high, config.learning_rate) == ("cispo", 4.0, 1e-3)


TRAIN = "/api/models/demo/agent/train"


async def sent_config(server: Any) -> dict[str, Any]:
    return server.sent("POST", TRAIN)[-1].json()["config"]


async def test_backend_train_is_arts(server, answer, backend, model, groups, caplog):
    server.on("POST", TRAIN, lambda _: answer(lines=[{"event": "done", "job_id": "j", "step": 1}]))
    result = await backend.train(model, groups, learning_rate=1e-4, loss_fn="cispo", beta=0.1)
    assert result.step == 1
    config = await sent_config(server)
    assert (config["clip"], config["normalisation"], config["beta"]) == ("cispo", "trajectory", 0.1)
    assert (config["ratio_to"], config["correction"]) == ("sampled", "off")
    await backend.train(model, groups, loss_fn="ppo", packed_sequence_length=2048)
    assert "an art-server ignores these options: packed_sequence_length" in caplog.text
    config = await sent_config(server)
    clip = (config["clip"], config["epsilon"], config["epsilon_high"])
    assert clip == ("two_sided", 0.2, None)
    await backend.train(model, groups, art.TrainConfig(max_grad_norm=0.5))
    config = await sent_config(server)
    assert (config["max_grad_norm"], config["ratio_to"]) == (0.5, "start")
    with pytest.raises(ValueError, match="learning_rate"):
        await backend.train(model, groups, art.TrainConfig(), learning_rate=1e-4)


async def test_dev_config_of_a_train_call_is_honoured(server, answer, model, groups, caplog):
    server.on("POST", TRAIN, answer(lines=[{"event": "done", "job_id": "j", "step": 1}]))
    with caplog.at_level(logging.WARNING):
        await model.train(groups, _config=art.dev.TrainConfig(scale_rewards=False, invented=1))
    config = await sent_config(server)
    assert (config["scaling"], config["ratio_to"]) == ("none", "sampled")
    assert "_config is ignored for these keys: invented" in caplog.text


async def test_a_run_name_is_what_the_server_calls_the_model(server, answer, backend):
    server.on("GET", "/api/models/demo/run-2", answer(body={"name": "run-2", "project": "demo"}))
    model = art.TrainableModel(name="agent", run_name="run-2", project="demo", base_model="art/tiny")
    await model.register(backend)
    assert server.sent("POST", "/api/models")[0].json()["name"] == "run-2"
    assert model.get_inference_name() == "demo/run-2"
    with pytest.raises(ValueError, match="run_name"):
        art.TrainableModel(name="a", run_name="a/b", project="p", base_model="b")
