"""Mended bugs of the GPU path that ``pytest --put-back NAME`` puts back: a test finds each without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

ENVIRONMENT = "TLT_PUT_BACK"


@dataclass(frozen=True)
class Bug:
    """How to put a bug back, the tests that must fail then, and what they must say."""

    install: Callable[[], None]
    tests: str
    says: str


def install_from_environment() -> None:
    """Put back the bug that the test session was asked for, if any; for processes that tests start."""
    if name := os.environ.get(ENVIRONMENT):
        BUGS[name].install()


def _policy_stays_on_the_device() -> None:
    from megatron_tlt.platform.offload import StorageOffload

    StorageOffload.offload = lambda self, *_, **__: 0  # type: ignore[method-assign]


def _memory_as_torch_counts_it() -> None:
    import torch

    from megatron_tlt.platform.device import Device

    Device.memory_bytes = lambda self: torch.cuda.memory_reserved(self.torch_device)  # type: ignore[method-assign]


def _all_logits_widened() -> None:
    from megatron.core.transformer.module import Float16Module

    forward = Float16Module.forward
    Float16Module.forward = lambda self, *inputs, fp32_output=True, **options: forward(self, *inputs, **options)


def _rotary_reads_on_the_host() -> None:
    from megatron_tlt.actor import megatron_rotary

    megatron_rotary.apply_packed_rotary = megatron_rotary._library_function


def _a_generator_for_each_request() -> None:
    from megatron_tlt.rollout import vllm_setup

    vllm_setup.counts_random_numbers = lambda rollout: False


def _full_graphs_rounded_up() -> None:
    from megatron_tlt.rollout import vllm_graphs

    vllm_graphs.graphs_by_tokens = lambda required: nullcontext()  # type: ignore[assignment]


def _a_kernel_for_each_slice() -> None:
    from megatron_tlt.reshard import checksum

    checksum.STACKED_BYTES = 1


def _a_function_that_a_release_lacks() -> None:
    from megatron_tlt.rollout import vllm_versions

    vllm_versions.REQUIRED_ATTRIBUTES += (("vllm.v1.worker.gpu_worker", "Worker.doze"),)


def _drafts_read_at_each_depth() -> None:
    from megatron_tlt.rollout.vllm_draft_sampling import DraftSampler

    sample = DraftSampler._sample

    def read(self: DraftSampler, *arguments: Any) -> Any:
        tokens, rest = sample(self, *arguments)
        tokens.tolist()
        return tokens, rest

    DraftSampler._sample = read  # type: ignore[method-assign]


BUGS = {
    "policy-beside-engine": Bug(
        _policy_stays_on_the_device, "tests/trainer/test_start_phase.py", "are in use where an engine is built"
    ),
    "memory-of-torch": Bug(_memory_as_torch_counts_it, "tests/platform/test_device.py", "memory_bytes"),
    "widened-logits": Bug(_all_logits_widened, "tests/actor/test_offload.py", "torch.bfloat16"),
    "rotary-reads": Bug(_rotary_reads_on_the_host, "tests/actor/test_rotary.py", "the host reads a tensor"),
    "generators": Bug(_a_generator_for_each_request, "tests/rollout/test_seeded_sampler.py", "InputBatch object"),
    "rounded-graphs": Bug(_full_graphs_rounded_up, "tests/rollout/test_graphs.py", "At index 1 diff: 16 != 12"),
    "slice-kernels": Bug(_a_kernel_for_each_slice, "tests/reshard/test_checksum.py", "operations for"),
    "drafts-read-by-depth": Bug(
        _drafts_read_at_each_depth, "tests/rollout/test_sync_audit.py", "host reads by function"
    ),
    "missing-function": Bug(
        _a_function_that_a_release_lacks, "tests/interface/test_vllm_releases.py", "run tools/interface_lock.py"
    ),
}
