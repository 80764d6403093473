import pytest
import torch

from art_server.trainer import head
from art_server.trainer.head import score_targets, whole_pieces


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(torch.tanh(hidden @ weight.T / 3) * 3, -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("max_logits", [1, 3 * 50, 10_000], ids=["one", "three", "all"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_change_neither_values_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, with_entropy: bool
) -> None:
    monkeypatch.setattr(head, "MAX_LOGITS", {"cpu": max_logits})
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 6, generator=generator, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(50, 6, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (11,), generator=generator)
    slopes, entropy_slopes = torch.randn(2, 11, generator=generator)

    logprobs, entropies, is_likeliest, _ = score_targets(
        hidden,
        whole_pieces(targets, lambda states: torch.tanh(states @ weight.T / 3) * 3, 50),
        with_entropy_gradient=with_entropy,
    )
    expected_logprobs, expected_entropies = plain(hidden, weight, targets)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-5, rtol=1e-5)
    assert entropies.requires_grad == with_entropy
    logits = torch.tanh(hidden @ weight.T / 3) * 3
    assert torch.equal(is_likeliest, logits.argmax(-1) == targets)

    objective = (slopes * logprobs).sum()
    expected = (slopes * expected_logprobs).sum()
    if with_entropy:
        objective = objective + (entropy_slopes * entropies).sum()
        expected = expected + (entropy_slopes * expected_entropies).sum()
    grad_hidden, grad_weight = torch.autograd.grad(expected, (hidden, weight))
    objective.backward()
    torch.testing.assert_close(hidden.grad, grad_hidden, atol=1e-5, rtol=1e-4)
    # The head's own parameters get theirs too: a LoRA may sit there.
    torch.testing.assert_close(weight.grad, grad_weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("max_logits", [1, 3 * 50, 10_000], ids=["one", "three", "all"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_further_tokens_have_their_log_probabilities_and_gradients(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, with_entropy: bool
) -> None:
    """The target may be one of them."""
    monkeypatch.setattr(head, "MAX_LOGITS", {"cpu": max_logits})
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 6, generator=generator, requires_grad=True)
    weight = torch.randn(50, 6, generator=generator, requires_grad=True)
    further = torch.stack([torch.randperm(50, generator=generator)[:5] for _ in range(11)])
    targets = further[:, 2]
    slopes, entropy_slopes = torch.randn(2, 11, generator=generator)
    more_slopes = torch.randn(11, 5, generator=generator)
    pieces = whole_pieces(targets, lambda states: states @ weight.T, 50, further)
    scores = score_targets(hidden, pieces, with_entropy_gradient=with_entropy)
    expected = torch.log_softmax(hidden @ weight.T, -1)
    torch.testing.assert_close(scores.more_NK, expected.gather(1, further), atol=1e-5, rtol=1e-5)
    objective = (slopes * scores.logprobs_N).sum() + (more_slopes * scores.more_NK).sum()
    plain_objective = (slopes * expected.gather(1, targets[:, None])[:, 0]).sum()
    plain_objective = plain_objective + (more_slopes * expected.gather(1, further)).sum()
    if with_entropy:
        objective = objective + (entropy_slopes * scores.entropies_N).sum()
        plain_objective = plain_objective - (entropy_slopes * (expected.exp() * expected).sum(-1)).sum()
    grad_hidden, grad_weight = torch.autograd.grad(plain_objective, (hidden, weight))
    objective.backward()
    torch.testing.assert_close(hidden.grad, grad_hidden, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weight.grad, grad_weight, atol=1e-5, rtol=1e-4)


def test_hopeless_and_certain_tokens_stay_finite() -> None:
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[300.0], [0.0], [-300.0]])
    logprobs, entropies, is_likeliest, _ = score_targets(
        hidden, whole_pieces(torch.tensor([2, 0]), lambda states: states @ weight.T, 3), with_entropy_gradient=True
    )
    assert logprobs.tolist() == [-600.0, 0.0]
    assert entropies.tolist() == [0.0, 0.0]
    assert is_likeliest.tolist() == [False, True]
    (logprobs.sum() + entropies.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
