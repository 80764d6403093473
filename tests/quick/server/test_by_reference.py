"""Requests name what the server sampled: the real client and server, with simulated engine and trainer."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from tests.fakes.vllm import ANSWER, PROMPT
from tests.quick.server.served import Served, sample_group, serving
from tests.refusals import refused

pytestmark = pytest.mark.anyio

UNKNOWN = [None] * len(PROMPT + ANSWER)
KNOWN = [None] * len(PROMPT) + [-0.5] * len(ANSWER)


@contextlib.asynccontextmanager
async def model_on(folder: Path) -> AsyncIterator[tuple[Served, art.TrainableModel]]:
    async with serving(folder) as served, art.Backend(served.url) as backend:
        model = art.TrainableModel(name="agent", project="demo", base_model="base")
        await model.register(backend)
        yield served, model


def trained(served: Served) -> list[tuple[list[int], list[float | None]]]:
    """The sequences of the last job, with their log-probabilities."""
    return [
        (sequence["token_ids"], sequence["logprobs"])
        for group in served.trainer.batches[-1]["groups"]
        for trajectory in group["trajectories"]
        for sequence in trajectory["rows"]
    ]


@pytest.mark.parametrize("asked", [{}, {"logprobs": True}, {"extra_body": {"return_token_ids": True}}])
async def test_what_is_trained_does_not_depend_on_what_the_program_asked_for(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    async with model_on(tmp_path) as (served, model):
        group = await sample_group(model, **asked)
        choice = group.trajectories[0].messages_and_choices[-1]
        assert hasattr(choice, "token_ids") == hasattr(choice, "prompt_token_ids") == bool(asked)
        assert choice.art["num_tokens"] == len(ANSWER)  # type: ignore[union-attr]
        result = await model.train([group])
        assert result.report.turns == {"ledger": 2}
        assert not any("ratio 1" in note for note in result.report.notes)
        assert trained(served) == [(PROMPT + ANSWER, KNOWN)] * 2


@pytest.mark.parametrize("asked", [{"logprobs": True}, {"extra_body": {"return_token_ids": True}}])
async def test_choices_of_another_server_are_sent_whole_under_one_key(tmp_path: Path, asked: dict[str, Any]) -> None:
    async with model_on(tmp_path / "one") as (_, sampler):
        group = await sample_group(sampler, **asked)
    async with model_on(tmp_path / "two") as (served, model):
        group.trajectories += (await sample_group(model)).trajectories
        result = await model.train([group], idempotency_key="step 1")
        assert result.report.turns == {"ids": 2, "ledger": 2}
        assert any("ratio 1" in note for note in result.report.notes)
        sequences = [(PROMPT + ANSWER, UNKNOWN)] * 2 + [(PROMPT + ANSWER, KNOWN)] * 2
        assert trained(served) == sequences
        again = await model.train([group], idempotency_key="step 1")
        assert (again.step, again.report) == (result.step, result.report)
        assert len(served.trainer.batches) == 1, "a call that is repeated gets the same job"
        with refused(art.ArtStatusError, "key_reused", "idempotency-key"):
            await model.train([group, group], idempotency_key="step 1")


async def test_choices_without_record_and_tokens_are_named(tmp_path: Path) -> None:
    async with model_on(tmp_path / "one") as (_, sampler):
        group = await sample_group(sampler)
    async with model_on(tmp_path / "two") as (_, model):
        with refused(art.ArtStatusError, "no_trainable_turn", "groups"):
            await model.train([group])
        own = await sample_group(model)
        result = await model.train([group, own])
        (dropped, _) = result.report.dropped
        assert dropped.count == 2 and "carries no tokens" in dropped.reason


async def test_a_digest_that_is_none_is_refused(tmp_path: Path) -> None:
    async with model_on(tmp_path) as (served, _), httpx.AsyncClient(base_url=served.url) as client:
        headers = {"x-art-request-digest": "abc"}
        path = "/api/models/demo/agent/train"
        answer = await client.post(path, json={"groups": []}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_digest")
