"""A real local judge through vLLM, with a JSON schema: the base model of a policy, and a model that was taught to judge."""

import itertools
import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

import art
from art.rewards import Judge, JudgeError, ruler_score_group
from art.rewards.answers import schema_of
from art.rewards.judge import Messages
from tests.live import PROJECT, Server

pytestmark = pytest.mark.anyio

SHORT = json.loads(
    json.dumps(schema_of(["1", "2"]))
    .replace('"type": "string"', '"type": "string", "maxLength": 20')
    .replace('"type": "number", "minimum": 0, "maximum": 1', '"enum": [0, 0.25, 0.5, 0.75, 1]')
)
"""A schema whose answers are short: under it, even art/tiny comes to an end."""
FORM = {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": SHORT}}


VALUES = {"yes": 0.5, "no": 0.0, "maybe": 1.0}
"""Answers, and what they are worth."""


def group_of(words: list[str]) -> art.TrajectoryGroup:
    return art.TrajectoryGroup(
        art.Trajectory(
            messages_and_choices=[
                {"role": "user", "content": "respond with yes, no, maybe"},
                {"role": "assistant", "content": word},
            ]
        )
        for word in words
    )


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


@pytest.mark.parametrize("form", [{}, {"response_format": FORM}], ids=["ours", "short"])
@pytest.mark.parametrize("mode", ["listwise", "pairwise"])
async def test_a_small_model_judges_or_its_answers_are_refused(
    base: art.Model, mode: Literal["listwise", "pairwise"], form: dict[str, Any]
) -> None:
    """art/tiny has 1,024 tokens and little sense. Its answers fit the schema, unless max_tokens cuts them."""
    group = group_of(["yes", "no", "yes"])
    judge = Judge(base, options={"max_tokens": 160, "seed": 1, **form})
    try:
        scored = await ruler_score_group(group, judge, mode=mode)
    except JudgeError as error:
        assert "two unusable answers" in str(error), error
        return
    assert scored is not None and len(scored) == 3
    assert all(0 <= each.metrics["ruler_score"] <= 1 for each in scored)
    assert scored.trajectories[0].reward == scored.trajectories[2].reward
    assert scored.metrics["ruler_prompt_tokens"] > 0
    assert scored.metrics["ruler_completion_tokens"] > 0


async def test_a_model_that_was_taught_to_judge_gives_right_scores(server: Server) -> None:
    """Demonstrations of a judge's answers, from a function that knows the scores. Other orders and pairs are judged."""
    demonstrations: list[art.Trajectory] = []

    async def teacher(messages: Messages) -> str:
        words = re.findall(r'"role": "assistant", "content": "(\w+)"', messages[-1]["content"])
        scores = {
            str(number): {"explanation": word, "score": VALUES[word]}
            for number, word in enumerate(words, 1)
        }
        answer: Any = {"role": "assistant", "content": json.dumps({"scores": scores})}
        told: list[Any] = [*messages, answer]
        demonstrations.append(art.Trajectory(messages_and_choices=told))
        return answer["content"]

    orders = [list(each) for size in (2, 3) for each in itertools.permutations(VALUES, size)]
    random.Random(0).shuffle(orders)
    for words in orders[4:]:
        await ruler_score_group(group_of(words), Judge(teacher))
    async with art.Backend(server.url) as backend:
        model = art.TrainableModel(name="a-judge", project=PROJECT, base_model="art/tiny")
        await model.register(backend)
        config = art.TrainSFTConfig(
            learning_rate=2e-3, batch_size=4, epochs=48, assistant_turns="last"
        )
        await model.train_sft(demonstrations, config)
        judge = Judge(model, options={"max_tokens": 160, "temperature": 0})
        for words in orders[:4]:
            scored = await ruler_score_group(group_of(words), judge)
            assert scored is not None
            assert [each.reward for each in scored] == [VALUES[word] for word in words]
        pairwise = await ruler_score_group(group_of([*VALUES, "yes"]), judge, mode="pairwise")
        assert pairwise is not None
        assert [each.reward for each in pairwise] == [0.5, 0.0, 1.0, 0.5]
        await model.delete()
