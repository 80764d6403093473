"""A real local judge through vLLM, with a JSON schema: the base model of a policy, and a model that was taught to judge."""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

import art
from art.rewards import Judge, JudgeError, ruler_score_group
from art.rewards.judge_answers import schema_of
from tests.engine.integration.judged_answers import group_of
from tests.live import PROJECT, Server

pytestmark = pytest.mark.anyio

SHORT = json.loads(
    json.dumps(schema_of(["1", "2"]))
    .replace('"type": "string"', '"type": "string", "maxLength": 20')
    .replace('"type": "number", "minimum": 0, "maximum": 1', '"enum": [0, 0.25, 0.5, 0.75, 1]')
)
"""A schema whose answers are short: under it, even art/tiny comes to an end."""


FORM = {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": SHORT}}


@pytest.fixture
async def base(server: Server) -> AsyncIterator[art.Model]:
    async with art.Backend(server.url) as backend:
        model = art.TrainableModel(name="judged", project=PROJECT, base_model="art/tiny")
        await model.register(backend)
        base = art.Model(
            name="base",
            project=PROJECT,
            inference_base_url=model.inference_base_url,
            inference_api_key=model.inference_api_key,
            inference_model_name=model.base_model,
        )
        yield base
        await base.close()


@pytest.mark.parametrize(
    ("mode", "form"),
    [("listwise", {}), ("listwise", {"response_format": FORM}), ("pairwise", {"response_format": FORM})],
    ids=["listwise, our schema", "listwise", "pairwise"],
)
async def test_a_small_model_judges_or_its_answers_are_refused(
    base: art.Model, mode: Literal["listwise", "pairwise"], form: dict[str, Any]
) -> None:
    """art/tiny has 1,024 tokens and little sense. Its answers fit the schema, unless max_tokens cuts them."""
    group = group_of(["yes", "no", "yes"])
    judge = Judge(base, options={"max_tokens": 160, "seed": 1, **form})
    try:
        scored = await ruler_score_group(group, judge, mode=mode)
    except JudgeError:
        return
    assert scored is not None and len(scored) == 3
    assert all(0 <= trajectory.metrics["ruler_score"] <= 1 for trajectory in scored)
    assert scored.trajectories[0].reward == scored.trajectories[2].reward
    assert scored.metrics["ruler_prompt_tokens"] > 0
    assert scored.metrics["ruler_completion_tokens"] > 0
