import asyncio
from typing import Any

import pytest

import art

pytestmark = pytest.mark.anyio


def make_model(**fields: Any) -> art.TrainableModel:
    return art.TrainableModel(**{"name": "agent", "project": "demo", "base_model": "art/tiny", **fields})


@pytest.mark.parametrize("field", ["name", "project"])
@pytest.mark.parametrize("value", ["", "a/b", ".hidden", "a b", "ü", "x" * 129, "name\n"])
def test_name_that_cannot_be_a_folder_is_refused(field: str, value: str):
    with pytest.raises(ValueError, match=f"^TrainableModel: {field} .* becomes a folder"):
        make_model(**{field: value})


def test_misspelt_field_is_refused():
    with pytest.raises(ValueError, match="'basemodel': did you mean 'base_model'"):
        make_model(basemodel="x")


def test_inference_name_is_project_and_name_with_an_optional_step():
    model = make_model()
    assert model.get_inference_name() == "demo/agent"
    assert model.get_inference_name(step=0) == "demo/agent@0"
    plain = art.Model(name="judge", project="demo", inference_model_name="openai/gpt")
    assert (plain.get_inference_name(), plain.trainable) == ("openai/gpt", False)
    assert art.Model(name="judge", project="demo").get_inference_name(2) == "judge@2"


async def test_unregistered_model_says_what_to_do():
    model = make_model()
    with pytest.raises(ValueError, match="register"):
        model.openai_client()
    with pytest.raises(ValueError, match="register"):
        await model.get_step()
    with pytest.raises(ValueError, match="inference_base_url"):
        art.Model(name="judge", project="demo").openai_client()
    assert await art.Model(name="judge", project="demo").get_step() == 0


def test_repr_hides_the_key():
    model = make_model(inference_api_key="secret")
    assert "secret" not in repr(model) and "secret" not in str(model)


async def test_deep_copy_of_a_registered_model_is_registered_too(model: art.TrainableModel, backend: art.Backend):
    client = model.openai_client()
    other = model.model_copy(deep=True, update={"name": "other"})
    assert other.backend() is backend and other.openai_client() is client
    other.config = {"own": 1}
    assert model.config is None


async def test_client_is_the_same_until_it_is_closed(model: art.TrainableModel):
    client = model.openai_client()
    assert model.openai_client() is client
    await client.close()
    assert model.openai_client() is not client


def test_each_event_loop_gets_its_own_client():
    model = make_model(inference_base_url="http://127.0.0.1:1/v1")

    async def get() -> object:
        client = model.openai_client()
        await client.close()
        return client

    assert asyncio.run(get()) is not asyncio.run(get())
    assert model.openai_client() is model.openai_client()
