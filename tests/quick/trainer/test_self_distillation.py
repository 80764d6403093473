"""Advantages of `art.distill` with a teacher that reads more, as the trainer makes a step of them: the step's gradient against
autograd of the definitions, in Hugging Face's own code."""

import math
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types.chat.chat_completion import Choice
from peft import PeftModel
from transformers import AutoModelForCausalLM

import art
from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.trainer_messages import (
    Batch,
    Done,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
)
from art_server.trainer.job import train
from art_server.trainer.policy import Policy
from tests.fakes.server import Answer, FakeServer, Request

pytestmark = pytest.mark.anyio

PROMPT, HINT = [5, 6, 7], [40, 41, 42, 43]
"""The tokens of the question, and of what only the teacher reads."""


@pytest.fixture(scope="module")
def plain(base_dir: Path, adapter_dir: Path) -> PeftModel:
    """The policy of `adapter_dir` in Hugging Face's own code."""
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True).eval()


@pytest.fixture
async def teacher(policy: Policy, adapter_dir: Path) -> AsyncIterator[art.Model]:
    """The policy itself, served: it renders each word of a message as its number."""
    policy.load_adapter(LoRAConfig(), adapter_dir)

    def render(request: Request) -> Answer:
        words = " ".join(message["content"] for message in request.json()["messages"]).split()
        choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": ""}}
        return answer("chat.completion", choice, prompt_token_ids=[int(word) for word in words])

    def score(request: Request) -> Answer:
        prompt = request.json()["prompt"]
        logprobs = policy.sequence_logprobs(prompt).tolist()
        entries = [{str(token): {"logprob": value}} for token, value in zip(prompt[1:], logprobs, strict=True)]
        choice = {"index": 0, "finish_reason": "length", "text": "", "prompt_logprobs": [None, *entries]}
        return answer("text_completion", choice)

    def answer(kind: str, choice: dict[str, Any], **more: Any) -> Answer:
        return Answer(body={"id": "1", "object": kind, "created": 1, "model": "m", "choices": [choice], **more})

    server = FakeServer()
    server.on("POST", "/v1/chat/completions", render)
    server.on("POST", "/v1/completions", score)
    await server.start()
    address = f"{server.url}/v1"
    model = art.Model(
        name="t", project="p", inference_model_name="m", inference_base_url=address, inference_api_key="k"
    )
    yield model
    await model.close()
    await server.stop()


def sampled(policy: Policy, tokens: list[int]) -> art.Trajectory:
    """An answer to the question, with the policy's own log-probabilities."""
    logprobs = policy.sequence_logprobs([*PROMPT, *tokens])[len(PROMPT) - 1 :].tolist()
    entries = [{"token": "", "logprob": value, "top_logprobs": []} for value in logprobs]
    choice = Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": entries},
            "prompt_token_ids": PROMPT,
            "token_ids": tokens,
        }
    )
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": words(PROMPT)}, choice])


def words(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


async def distilled(
    trajectories: list[art.Trajectory], teacher: art.Model, hint: list[int]
) -> list[tuple[list[int], list[float], list[float]]]:
    """For each trajectory the tokens, log-probabilities and advantages."""
    (group,) = await art.distill(
        [art.TrajectoryGroup(trajectories)],
        teacher,
        teacher_messages=lambda messages, *_: [*messages, {"role": "user", "content": words(hint)}],
        max_advantage=math.inf,
    )
    results: list[tuple[list[int], list[float], list[float]]] = []
    for trajectory in group:
        choice: Any = trajectory.messages_and_choices[-1]
        (advantages,) = trajectory.turn_advantages or []
        assert isinstance(advantages, list)
        results.append((choice.token_ids, [entry.logprob for entry in choice.logprobs.content], advantages))
    return results


def step(policy: Policy, adapter_dir: Path, out_dir: Path, answers: Any, config: TrainConfig) -> Done:
    """A step on the answers, as the server resolves them: rewards are equal, and each token has its advantage."""
    trajectories = [
        TrainableTrajectory(
            reward=0.0,
            sequences=[
                TokenSequence(
                    token_ids=[*PROMPT, *tokens],
                    logprobs=[*[None] * len(PROMPT), *logprobs],
                    advantages=dict(enumerate(advantages, len(PROMPT))),
                )
            ],
        )
        for tokens, logprobs, advantages in answers
    ]
    batch = Batch(groups=[TrainableGroup(trajectories=trajectories)])
    task = TrainTask(lora=LoRAConfig(), in_dir=str(adapter_dir), out_dir=str(out_dir), config=config, batch=batch)
    return train(policy, task, 4096, lambda _: None)


def logprobs_of(model: PeftModel, context: list[int], tokens: list[int]) -> torch.Tensor:
    """log p of all tokens of the vocabulary, at each of the answer's positions."""
    logits_TV = model(input_ids=torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits_TV, -1)


def check_gradients(policy: Policy, model: PeftModel, loss: torch.Tensor) -> None:
    """The policy's gradient is autograd's of the loss, within 1e-5 of the largest."""
    model.zero_grad()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3
    names = [name for name, parameter in policy.parameters.items() if parameter.grad is not None]
    assert names and set(names) == expected.keys()
    for name in names:
        torch.testing.assert_close(policy.parameters[name].grad, expected[name], rtol=1e-5, atol=1e-5 * largest)


CONFIG = TrainConfig(max_grad_norm=1e9)


async def test_the_gradient_is_that_of_the_sampled_form(
    policy: Policy, plain: PeftModel, adapter_dir: Path, tmp_path: Path, teacher: art.Model
) -> None:
    """The mean over tokens of sg(log p_student - log p_teacher) * log p_student. The tokens of an answer that is not distilled count
    in the mean."""
    rng = random.Random(1)
    answers = [[rng.randrange(128) for _ in range(length)] for length in (5, 2, 7)]
    results = await distilled([sampled(policy, tokens) for tokens in answers], teacher, HINT)
    losses: list[torch.Tensor] = []
    for tokens, _, advantages in results:
        student = logprobs_of(plain, PROMPT, tokens)[range(len(tokens)), tokens]
        with torch.no_grad():
            taught = logprobs_of(plain, [*PROMPT, *HINT], tokens)[range(len(tokens)), tokens]
        assert advantages == pytest.approx((taught - student).tolist(), abs=1e-4)
        losses.append((student - taught).detach() * student)
    left_out = ([3, 1], [-1.0, -2.0], [0.0, 0.0])
    step(policy, adapter_dir, tmp_path / "out", [*results, left_out], CONFIG)
    check_gradients(policy, plain, torch.cat([*losses, torch.zeros(2)]).mean())


async def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence(
    policy: Policy, plain: PeftModel, adapter_dir: Path, tmp_path: Path, teacher: art.Model
) -> None:
    """All answers of one token, each with its probability: the gradient of KL(student || teacher) over the vocabulary."""
    results = await distilled([sampled(policy, [token]) for token in range(128)], teacher, HINT)
    weighted = [
        (tokens, logprobs, [128 * math.exp(logprob) * advantage])
        for tokens, logprobs, advantages in results
        for logprob, advantage in zip(logprobs, advantages, strict=True)
    ]
    step(policy, adapter_dir, tmp_path / "out", weighted, CONFIG)
    student = logprobs_of(plain, PROMPT, [0])[0]
    with torch.no_grad():
        taught = logprobs_of(plain, [*PROMPT, *HINT], [0])[0]
    check_gradients(policy, plain, (student.exp() * (student - taught)).sum())


async def test_answers_that_are_not_distilled_make_no_step(
    policy: Policy, adapter_dir: Path, tmp_path: Path, teacher: art.Model
) -> None:
    (group,) = await art.distill(
        [art.TrajectoryGroup([sampled(policy, [9, 8]), sampled(policy, [4])])],
        teacher,
        teacher_messages=lambda *_: None,
    )
    answers = [([1] * len(advantages), [-1.0] * len(advantages), advantages) for (advantages,) in advantages_of(group)]
    assert [advantages for *_, advantages in answers] == [[0.0, 0.0], [0.0]]
    assert step(policy, adapter_dir, tmp_path / "out", answers, CONFIG).unchanged


def advantages_of(group: art.TrajectoryGroup) -> list[Any]:
    return [trajectory.turn_advantages for trajectory in group]
