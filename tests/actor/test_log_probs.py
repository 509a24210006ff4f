"""Log-probs and entropy against the full-vocabulary formula."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.actor.log_probs import vocab_parallel_scores


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [3, 64])
def test_equal_to_log_softmax_and_differentiable(temperature: float, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, 17, generator=generator, dtype=torch.float32).mul_(3).requires_grad_()
    labels = torch.randint(17, (11,), generator=generator)
    pull = torch.randn(2, 11, generator=generator)

    found = vocab_parallel_scores(logits, labels, temperature=temperature, chunk_tokens=chunk)
    (found[0] * pull[0] + found[1] * pull[1]).sum().backward()
    assert logits.grad is not None
    gradient, logits.grad = logits.grad.clone(), None

    log_p = torch.log_softmax(logits / temperature, dim=-1)
    expected = log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    (expected[0] * pull[0] + expected[1] * pull[1]).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, logits.grad, atol=1e-5, rtol=1e-5)
