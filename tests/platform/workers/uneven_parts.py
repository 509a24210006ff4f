"""Gathers and scatters parts of different sizes over two ranks with Megatron's own functions."""

from __future__ import annotations

import torch

from megatron_tlt.platform.device import barrier, initialize_distributed, prepare, rank

SIZES = [3, 5]


def main() -> None:
    prepare()
    initialize_distributed(60)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    start = sum(SIZES[: rank()])
    mine = torch.arange(start, start + SIZES[rank()], dtype=torch.float32)[:, None].requires_grad_()
    whole = gather_from_sequence_parallel_region(mine, group=group, output_split_sizes=SIZES)
    assert whole.flatten().tolist() == list(range(8)), whole
    # the gradient of a part is the sum of what both ranks say about it
    (whole * (rank() + 1.0)).sum().backward()
    assert mine.grad is not None and mine.grad.flatten().tolist() == [3.0] * SIZES[rank()], mine.grad
    barrier()  # nobody leaves while the other still talks to it
    print(f"rank {rank()}: uneven parts came and went")


if __name__ == "__main__":
    main()
