"""Every key of ART's settings and every option of its train call: what reaches the server, and what is named in a warning.
docs/compatibility.md has the same verdicts."""

import logging
from typing import Any

import pytest

import art
from art_server.api.engine_args import requested_engine_args
from plugins.compat.tests.surface import ENTRIES, SCRIPT

pytestmark = pytest.mark.anyio

TRAIN = "/api/models/demo/agent/train"
VALUES: dict[str, Any] = {
    "importance_sampling_level": "sequence",
    "loss_fn": "ppo",
    "scale_rewards": False,
    "normalize_advantages": False,
    "kl_penalty_source": "sample",
    "warmup_steps": 3,
}
"""Values with an effect. Others get 0.5."""
SWITCHES = {"allow_training_without_logprobs", "plot_tensors", "ppo", "precalculate_logprobs"}
"""Their defaults differ: one of both values has an effect."""
NO_DIFFERENCE = {"kl_penalty_source", "truncated_importance_sampling"}
"""The learner is the sampler; a cap needs precalculate_logprobs=True (plugins/compat/tests/test_options.py)."""


def verdicts(owner: str) -> dict[str, str]:
    """The status of each setting of a class, or of each option of a train call."""
    entries = [entry for entry in ENTRIES if entry.owner == owner and entry.name != owner]
    verdicts = {entry.last: SCRIPT.of_settings(entry) for entry in entries}
    return {name: verdict.status for name, verdict in verdicts.items() if verdict is not None}


def values_of(name: str) -> list[Any]:
    return [True, False] if name in SWITCHES else [VALUES.get(name, 0.5)]


def texts(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


async def test_settings_of_a_registration(server: Any, backend: art.Backend, caplog: pytest.LogCaptureFixture) -> None:
    engine, adapter = verdicts("art.dev.EngineArgs"), verdicts("art.dev.PeftArgs")
    loading, groups = verdicts("art.dev.InitArgs"), verdicts("art.dev.InternalModelConfig")
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    model._internal_config = art.dev.InternalModelConfig(
        {key: {"x": 1} for key in groups},
        init_args=art.dev.InitArgs(dict.fromkeys(loading, 512)),
        engine_args=art.dev.EngineArgs(dict.fromkeys(engine, 1)),
        peft_args=art.dev.PeftArgs(dict.fromkeys(adapter, 4), target_modules=["q_proj"]),
        trainer_args=None,
        torchtune_args=art.dev.TorchtuneArgs(model="x"),
    )
    await model.register(backend)
    sent = server.sent("POST", "/api/models")[0].json()
    assert sent["lora"] == {"rank": 4, "alpha": 4.0, "target_modules": ["q_proj"]}
    said = texts(caplog)
    for name, status in adapter.items():
        assert (f"LoRAConfig has no field '{name}'" in said) == (status == "warns"), name
    assert sent["engine_args"].pop("max_seq_length") == 512
    for name, status in loading.items():
        assert (f"init_args.{name} has no effect" in said) == (status == "warns"), name
    for name, status in groups.items():
        assert (f"_internal_config: {name} has no effect" in said) == (status == "warns"), name
    assert sent["engine_args"].keys() == engine.keys(), "the server decides"
    requested, unknown = requested_engine_args(sent["engine_args"], {"cuda"})
    assert requested.keys() == {name for name, status in engine.items() if status == "works"}
    assert len(unknown) == [*engine.values()].count("warns")


@pytest.mark.parametrize("owner", ["art.dev.TrainerArgs", "art.dev.TrainConfig", "art.local.LocalBackend.train"])
async def test_options_of_a_train_call(
    server: Any,
    answer: Any,
    backend: art.Backend,
    model: art.TrainableModel,
    groups: list[art.TrajectoryGroup],
    caplog: pytest.LogCaptureFixture,
    owner: str,
) -> None:
    done = [{"event": "done", "job_id": "j", "step": 1}]
    server.on("POST", TRAIN, lambda _: answer(lines=done))

    async def train(options: dict[str, Any]) -> dict[str, Any]:
        caplog.clear()
        if owner == "art.dev.TrainerArgs":
            model._internal_config = art.dev.InternalModelConfig(trainer_args=art.dev.TrainerArgs(options))
            await model.register(backend)
            await model.train(groups)
        elif owner == "art.dev.TrainConfig":
            await model.train(groups, _config=art.dev.TrainConfig({"verbose": False, **options}))
        else:
            await backend.train(model, groups, **options)
        return server.sent("POST", TRAIN)[-1].json()["config"]

    plain = await train({})
    for name, status in verdicts(owner).items():
        configs = [await train({name: value}) for value in values_of(name)]
        is_named = name in texts(caplog)
        if status == "warns":
            assert configs == [plain] and is_named, name
        elif name not in NO_DIFFERENCE:
            assert any(config != plain for config in configs) and not is_named, name


@pytest.mark.parametrize(
    ("owner", "known"),
    [
        ("art.TrainConfig", {"learning_rate": 1e-4, "beta": 0.5}),
        ("art.LoRAConfig", {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}),
        (
            "art.TrainSFTConfig",
            {"learning_rate": 1e-4, "batch_size": 4, "assistant_turns": "last"},
        ),
    ],
)
def test_fields_of_a_configuration(owner: str, known: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    statuses = verdicts(owner)
    kind = SCRIPT.find(owner)
    configuration = kind(**{name: known.get(name, 1) for name in statuses})
    assert configuration == kind(**known)
    assert {name for name, status in statuses.items() if status == "works"} == known.keys()
    for name, status in statuses.items():
        assert (f"has no field '{name}'" in texts(caplog)) == (status == "warns"), name


def test_settings_without_effect_are_dictionaries() -> None:
    """`_openai_client_config` is ignored with a warning (tests/quick/client/test_backend.py)."""
    for owner in ("art.dev.ServerArgs", "art.dev.OpenAIServerConfig", "art.dev.TorchtuneArgs"):
        statuses = verdicts(owner)
        settings = SCRIPT.find(owner)(dict.fromkeys(statuses, 1))
        assert set(statuses.values()) == {"warns"} and set(settings) == set(statuses)
