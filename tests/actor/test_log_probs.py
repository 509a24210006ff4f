"""Log-probs and entropy against the full-vocabulary formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.actor import log_probs
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


@pytest.mark.parametrize(("start", "columns"), [(0, 17), (5, 12)])
def test_columns_behind_the_vocabulary_are_in_no_sum_and_get_no_gradient(start: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, columns, generator=generator)
    padded = torch.cat([logits, torch.full((11, 3), 50.0)], dim=1).requires_grad_()
    labels = torch.randint(17, (11,), generator=generator)
    options = {"temperature": 0.7, "chunk_tokens": 4, "vocab_start": start}

    found = vocab_parallel_scores(padded, labels, vocab_size=17, **options)
    (found[0] + 0.1 * found[1]).sum().backward()
    whole = logits.clone().requires_grad_()
    expected = vocab_parallel_scores(whole, labels, **options)
    (expected[0] + 0.1 * expected[1]).sum().backward()
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert padded.grad is not None and whole.grad is not None
    torch.testing.assert_close(padded.grad[:, :columns], whole.grad, atol=0, rtol=0)
    assert bool(torch.all(padded.grad[:, columns:] == 0))


class _NewStorages(TorchDispatchMode):
    """Bytes of every storage that is made inside."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._kept: list[torch.Tensor] = []  # an address must not be used twice
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self._known:
            self._known.add(result.untyped_storage().data_ptr())
            self._kept.append(result)
            self.sizes.append(result.untyped_storage().nbytes())
        return result


def test_extra_memory_is_bounded_by_the_chunk() -> None:
    tokens, vocabulary, chunk = 64, 50, 8
    logits = torch.randn(tokens, vocabulary, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    with _NewStorages(logits) as forward:
        log_probs, entropy = vocab_parallel_scores(logits, labels, chunk_tokens=chunk)
    assert max(forward.sizes) == 4 * chunk * vocabulary
    with _NewStorages(logits) as backward:
        (log_probs.sum() + entropy.sum()).backward()
    # the gradient itself is as large as the logits
    assert sorted(backward.sizes)[-2:] == [4 * chunk * vocabulary, 4 * tokens * vocabulary]


def test_what_is_compiled_for_a_gpu_is_one_graph_and_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, peak = torch.randn(7, 30, generator=generator), torch.full((7,), 3.0)
    grads = torch.randn(7, generator=generator), torch.randn(7, generator=generator)
    for function, arguments in (
        (log_probs._sums, (logits, peak, 0.7, 28)),
        (log_probs._gradient, (logits, peak, peak / 2, grads, 0.7, 28)),
    ):
        compiled = torch.compile(function, dynamic=True, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*arguments), function(*arguments), rtol=0, atol=0)
        assert log_probs._fused(function, "cpu") is function
