"""A model is taught to judge."""

import itertools
import json
import random
import re
from typing import Any

import pytest

import art
from art.rewards import Judge, ruler_score_group
from art.rewards.judge import Messages
from tests.engine.integration.judged_answers import group_of
from tests.live import PROJECT, Server

pytestmark = pytest.mark.anyio

VALUES = {"yes": 0.5, "no": 0.0, "maybe": 1.0}
"""Answers, and what they are worth."""


async def test_a_model_that_was_taught_to_judge_gives_right_scores(server: Server) -> None:
    """Demonstrations of a judge's answers, from a function that knows the scores. Other orders and pairs are judged."""
    demonstrations: list[art.Trajectory] = []

    async def teacher(messages: Messages) -> str:
        words = re.findall(r'"role": "assistant", "content": "(\w+)"', messages[-1]["content"])
        scores = {str(number): {"explanation": word, "score": VALUES[word]} for number, word in enumerate(words, 1)}
        answer: Any = {"role": "assistant", "content": json.dumps({"scores": scores})}
        told: list[Any] = [*messages, answer]
        demonstrations.append(art.Trajectory(messages_and_choices=told))
        return answer["content"]

    orders = [list(order) for size in (2, 3) for order in itertools.permutations(VALUES, size)]
    random.Random(0).shuffle(orders)
    for words in orders[4:]:
        await ruler_score_group(group_of(words), Judge(teacher))
    async with art.Backend(server.url) as backend:
        model = art.TrainableModel(name="a-judge", project=PROJECT, base_model="art/tiny")
        await model.register(backend)
        config = art.TrainSFTConfig(learning_rate=2e-3, batch_size=4, epochs=48, assistant_turns="last")
        await model.train_sft(demonstrations, config)
        judge = Judge(model, options={"max_tokens": 160, "temperature": 0})
        for words in orders[:4]:
            scored = await ruler_score_group(group_of(words), judge)
            assert scored is not None
            assert [trajectory.reward for trajectory in scored] == [VALUES[word] for word in words]
        pairwise = await ruler_score_group(group_of([*VALUES, "yes"]), judge, mode="pairwise")
        assert pairwise is not None
        assert [trajectory.reward for trajectory in pairwise] == [0.5, 0.0, 1.0, 0.5]
        await model.delete()
