"""What ART's notebooks need of the client, found by running them (`plugins/compat/scripts/notebooks`)."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import art
from art.notices import left_out_sentence
from art.rewards import Judge
from art.utils.litellm import convert_litellm_choice_to_openai
from art_protocol.wire import Dropped, JobReport
from tests.refusals import refused

pytestmark = pytest.mark.anyio

DELETE = "/api/models/demo/agent/checkpoints/delete"


@pytest.mark.parametrize(
    ("name", "address", "variable"),
    [
        ("openrouter/vendor/some-model", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
        ("wandb/vendor/some-model", "https://api.inference.wandb.ai/v1", "WANDB_API_KEY"),
    ],
)
def test_the_provider_in_a_judge_s_name_has_an_address_and_a_key_of_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str, variable: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of another provider")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=variable):
        Judge(name)
    monkeypatch.setenv(variable, "from the environment")
    for argument, key in ((None, "from the environment"), ("given", "given")):
        endpoint = Judge(name, api_key=argument).endpoint
        assert endpoint is not None
        assert (endpoint.inference_base_url, endpoint.inference_api_key) == (address, key)
        assert endpoint.inference_model_name == "vendor/some-model"


def refusal(code: str) -> dict[str, Any]:
    error = {"message": "not so", "type": "invalid_request_error", "code": code, "param": None}
    return {"error": {**error, "retryable": False}}


async def test_deleting_by_a_metric_that_nothing_has_logged_yet_is_a_warning(
    server, answer, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    server.on("POST", DELETE, answer(422, refusal("unknown_metric")))
    with caplog.at_level(logging.WARNING, "art"):
        assert await model.delete_checkpoints("val/correct") is None
    assert "deleted nothing: the history has no val/correct" in caplog.text


async def test_other_refusals_to_delete_are_raised(server, answer, model: art.TrainableModel) -> None:
    server.on("POST", DELETE, answer(422, refusal("unknown_step")))
    with refused(art.ArtStatusError, "unknown_step"):
        await model.delete_checkpoints(keep=[7])


def test_a_choice_of_litellm_keeps_the_fields_of_the_server() -> None:
    """LiteLLM puts the fields that it does not know under `provider_specific_fields`."""
    fields = {
        "finish_reason": "stop",
        "index": 0,
        "message": {"role": "assistant", "content": "hi", "provider_specific_fields": None},
        "provider_specific_fields": {"token_ids": [5, 6], "art": {"id": "of the sample"}},
    }
    litellm_choice: Any = SimpleNamespace(model_dump=lambda: dict(fields))
    choice: Any = convert_litellm_choice_to_openai(litellm_choice)
    assert choice.art == {"id": "of the sample"} and choice.token_ids == [5, 6]
    assert art.Trajectory(messages_and_choices=[choice]).num_sampled_tokens() == 2
    fields["provider_specific_fields"] = None
    assert convert_litellm_choice_to_openai(litellm_choice).model_extra == {}


def test_several_trajectories_are_left_out() -> None:
    dropped = Dropped(reason="they are long", count=2, unit="trajectory")
    text = left_out_sentence(JobReport(num_trajectories=3, dropped=[dropped]))
    assert text is not None and "2 trajectories, because they are long" in text
