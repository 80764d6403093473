"""The divergence from a teacher's targets: against autograd of the definitions, on random models of few tokens and in a step."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.trainer_messages import (
    Batch,
    Done,
    TaughtSpan,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
    TrainTask,
)
from art_server.trainer.job import train
from art_server.trainer.policy import Policy
from art_server.trainer.teacher import divergence
from tests.makers.teacher_tops import teacher_top

ALPHAS = [0.0, 0.5, 1.0]
VOCABULARY = 128


def defined(student: torch.Tensor, teacher: torch.Tensor, alpha: float) -> torch.Tensor:
    """D_alpha of probabilities, as written in GKD, section 3: N."""

    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one * (one / other).log()).sum(-1)

    if alpha in (0, 1):
        return kl(student, teacher) if alpha else kl(teacher, student)
    mixture = (1 - alpha) * student + alpha * teacher
    return (1 - alpha) * kl(student, mixture) + alpha * kl(teacher, mixture)


def coarse(probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The probabilities of some tokens and, as the last entry, of all others."""
    chosen = probabilities.gather(-1, ids)
    return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1)


LOGITS = st.lists(st.floats(-6, 6), min_size=4, max_size=4)


@settings(deadline=None)
@given(student=LOGITS, teacher=LOGITS, alpha=st.sampled_from([*ALPHAS, 0.1, 0.9]))
def test_over_the_whole_vocabulary_it_is_the_definition(student: Any, teacher: Any, alpha: float) -> None:
    ours, plain = (torch.tensor([student], requires_grad=True) for _ in range(2))
    teacher_NV = torch.tensor([teacher]).log_softmax(-1)
    value = divergence(ours.log_softmax(-1), teacher_NV, alpha)
    expected = defined(plain.double().softmax(-1), teacher_NV.double().exp(), alpha)
    torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=1e-5)
    value.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-5, rtol=1e-5)


@settings(deadline=None)
@given(student=LOGITS, teacher=LOGITS, alpha=st.sampled_from(ALPHAS), top_k=st.integers(1, 3))
def test_the_rest_of_the_vocabulary_is_one_entry(student: Any, teacher: Any, alpha: float, top_k: int) -> None:
    """And the divergence with fewer entries is never above that with all."""
    ours, plain = (torch.tensor([student], requires_grad=True) for _ in range(2))
    teacher_NV = torch.tensor([teacher]).log_softmax(-1)
    ids = teacher_NV.topk(top_k).indices
    value = divergence(ours.log_softmax(-1).gather(-1, ids), teacher_NV.gather(-1, ids), alpha)
    student_NV = plain.double().softmax(-1)
    expected = defined(coarse(student_NV, ids), coarse(teacher_NV.double().exp(), ids), alpha)
    # float32 leaves 6e-8 of a tail; a logarithm of a small tail is as inexact as the tail.
    torch.testing.assert_close(value.double(), expected, atol=1e-3, rtol=1e-3)
    assert float(value.detach()) <= float(defined(student_NV, teacher_NV.double().exp(), alpha).detach()) + 1e-4
    value.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-3, rtol=1e-3)


@given(logits=LOGITS, alpha=st.sampled_from(ALPHAS))
def test_equal_distributions_have_no_divergence_and_no_gradient(logits: Any, alpha: float) -> None:
    student = torch.tensor([logits], requires_grad=True)
    logprobs = student.log_softmax(-1)[:, :3]
    value = divergence(logprobs, logprobs.detach(), alpha)
    value.sum().backward()
    assert abs(float(value.detach())) < 1e-6
    assert student.grad is not None and float(student.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("alpha", ALPHAS)
def test_an_entry_above_the_clip_counts_the_clip_and_has_no_gradient(alpha: float) -> None:
    student = torch.tensor([[2.0, 0.0, -1.0, 0.5]], requires_grad=True)
    teacher = torch.tensor([[-1.0, 3.0, -1.0, 0.5]]).log_softmax(-1)
    logprobs = student.log_softmax(-1)
    probabilities, taught = logprobs.exp(), teacher.exp()
    mixture = (1 - alpha) * probabilities + alpha * taught
    one, other = (probabilities, taught) if alpha else (taught, probabilities)
    parts = one * (one / other).log()
    if alpha == 0.5:
        parts = (probabilities * (probabilities / mixture).log() + taught * (taught / mixture).log()) / 2
    assert bool((parts > 0.05).any() & (parts < 0.05).any())
    expected = parts.clamp(max=0.05).sum()
    value = divergence(logprobs, teacher, alpha, 0.05)
    torch.testing.assert_close(value.sum(), expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(value.sum(), student, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)


# --- in a step --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(base_dir: Path, adapter_dir: Path) -> PeftModel:
    """The policy of `adapter_dir` in Hugging Face's own code."""
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True).eval()


Answer = tuple[list[int], list[int], torch.Tensor | None, float]
"""Prompt, sampled tokens, the teacher's log-probabilities of the whole vocabulary at these tokens, and the advantage."""


def random_answers(seed: int) -> list[Answer]:
    """Answers to one prompt that begin alike, two of them equal with other teachers, and one without a teacher."""
    rng, chance = random.Random(seed), torch.Generator().manual_seed(seed)
    prompt, beginning = [5, 6, 7], [rng.randrange(VOCABULARY) for _ in range(3)]
    tokens = [beginning + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(4))] for _ in range(3)]
    answers: list[Answer] = []
    for number, sampled in enumerate([*tokens, tokens[0]]):
        teacher = torch.randn(len(sampled), VOCABULARY, generator=chance).mul(2).log_softmax(-1)
        answers.append((prompt, sampled, None if number == 1 else teacher, rng.choice([0.0, 0.7])))
    return answers


def chosen_ids(teacher: torch.Tensor, top_k: int) -> torch.Tensor:
    return teacher.topk(top_k).indices


def step(
    policy: Policy,
    adapter_dir: Path,
    out_dir: Path,
    answers: list[Answer],
    top_k: int,
    config: TrainConfig,
    budget: int = 4096,
    noise: float = 0.0,
) -> Done:
    policy.load_adapter(LoRAConfig(), adapter_dir)
    trajectories: list[TrainableTrajectory] = []
    for prompt, tokens, teacher, advantage in answers:
        logprobs = [value - noise for value in policy.sequence_logprobs([*prompt, *tokens])[len(prompt) - 1 :].tolist()]
        taught: list[TaughtSpan] = []
        if teacher is not None:
            ids = chosen_ids(teacher, top_k)
            top = teacher_top(ids, teacher.gather(-1, ids))
            taught = [TaughtSpan(start=len(prompt), stop=len(prompt) + len(tokens), top=top)]
        sequence = TokenSequence(
            token_ids=[*prompt, *tokens],
            logprobs=[*[None] * len(prompt), *logprobs],
            advantages=dict.fromkeys(range(len(prompt), len(prompt) + len(tokens)), advantage),
            taught=taught,
        )
        trajectories.append(TrainableTrajectory(reward=0.0, sequences=[sequence]))
    batch = Batch(groups=[TrainableGroup(trajectories=trajectories)])
    task = TrainTask(lora=LoRAConfig(), in_dir=str(adapter_dir), out_dir=str(out_dir), config=config, batch=batch)
    return train(policy, task, budget, lambda _: None)


def plain_loss(model: PeftModel, answers: list[Answer], top_k: int, config: TrainConfig, noise: float) -> torch.Tensor:
    """The policy gradient and the divergence, answer by answer, with one entry for the rest of the vocabulary."""
    terms: list[torch.Tensor] = []
    for prompt, tokens, teacher, advantage in answers:
        logits_TV = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        own = logits_TV.log_softmax(-1)[range(len(tokens)), tokens]
        weight = min(math.exp(noise), config.correction_high)
        term = -weight * advantage * (own - own.detach()).exp()
        if teacher is not None:
            ids = chosen_ids(teacher, top_k)
            student, taught = (coarse(p, ids) for p in (logits_TV.double().softmax(-1), teacher.double().exp()))
            if top_k == VOCABULARY:
                student, taught = student[:, :-1], taught[:, :-1]
            term = term + weight * defined(student, taught, config.distill_alpha).float()
        terms.append(term)
    return torch.cat(terms).mean()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([4096, 12]),
    is_shared=st.booleans(),
    alpha=st.sampled_from(ALPHAS),
    top_k=st.sampled_from([1, 20, VOCABULARY]),
    noise=st.sampled_from([0.0, 0.3, 1.5]),
)
def test_loss_and_gradient_are_those_of_the_definition(
    policy: Policy,
    plain: PeftModel,
    adapter_dir: Path,
    tmp_path: Path,
    seed: int,
    budget: int,
    is_shared: bool,
    alpha: float,
    top_k: int,
    noise: float,
) -> None:
    """On trees and on rows, in one micro-batch and in several, with the truncated ratio to what sampled."""
    answers, config = random_answers(seed), TrainConfig(distill_alpha=alpha, max_grad_norm=1e9)
    policy.use_trees(is_shared)
    done = step(policy, adapter_dir, tmp_path / "out", answers, top_k, config, budget, noise)
    plain.zero_grad()
    loss = plain_loss(plain, answers, top_k, config, noise)
    loss.backward()
    assert done.metrics["loss/train"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-5)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(policy.parameters[name].grad, gradient, rtol=1e-4, atol=1e-5 * largest)


def test_targets_alone_make_a_group_that_trains_and_falls(policy: Policy, adapter_dir: Path, tmp_path: Path) -> None:
    """Steps on the same targets bring the student closer, also in several optimizer steps of a job."""
    answers: list[Answer] = [(*answer[:3], 0.0) for answer in random_answers(3)]
    config = TrainConfig(learning_rate=1e-2)
    first = step(policy, adapter_dir, tmp_path / "one", answers, 20, config)
    assert not first.unchanged and first.metrics["data/step_num_groups_trainable"] == 1
    num_taught = sum(len(tokens) for _, tokens, teacher, _ in answers if teacher is not None)
    num_tokens = sum(len(tokens) for _, tokens, *_ in answers)
    mean = first.metrics["loss/teacher_divergence"]
    assert first.metrics["loss/train"] == pytest.approx(mean * num_taught / num_tokens, rel=1e-4)
    several = step(policy, adapter_dir, tmp_path / "two", answers, 20, config.model_copy(update={"passes": 8}))
    assert several.losses[-1] < 0.8 * several.losses[0]
    none: list[Answer] = [(prompt, tokens, None, 0.0) for prompt, tokens, *_ in answers]
    assert step(policy, adapter_dir, tmp_path / "none", none, 20, config).unchanged


def test_a_teacher_that_is_the_student_has_no_gradient(
    policy: Policy, plain: PeftModel, adapter_dir: Path, tmp_path: Path
) -> None:
    prompt, tokens = [5, 6, 7], [9, 8, 3]
    with torch.no_grad():
        own = plain(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, 2:-1].log_softmax(-1)
    for alpha in ALPHAS:
        config = TrainConfig(distill_alpha=alpha)
        done = step(policy, adapter_dir, tmp_path / str(alpha), [(prompt, tokens, own, 0.0)], 20, config)
        assert abs(done.metrics["loss/train"]) < 1e-6 and done.metrics["loss/grad_norm"] < 1e-4
