"""Exports the trained policy as a Hugging Face folder that stock tools can load."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_tlt.actor.policy import Policy
from megatron_tlt.checkpoint.shared import run_together, shared_folder
from megatron_tlt.models.hf_folder import copy_side_files
from megatron_tlt.platform.device import rank
from megatron_tlt.platform.files import write_errors

_WEIGHTS = "model.safetensors"


def save_hf_folder(policy: Policy, source: Path, folder: Path) -> None:
    """Writes weights under Hugging Face names, with configuration and tokenizer copied from ``source``; a collective.

    Raises:
        RunError: a write fails, such as on a full disk; ``folder`` is complete or absent.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in policy.export_weights():
        if rank() == 0:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()

    def write() -> None:
        if rank():
            return
        with write_errors(folder):
            copy_side_files(source, temporary)
            try:
                save_file(tensors, temporary / _WEIGHTS, metadata={"format": "pt"})
            except SafetensorError as error:  # carries the operating system's message
                raise OSError(str(error)) from error

    with shared_folder(folder) as temporary:
        run_together(write)
