"""Exports the trained policy as a Hugging Face folder that stock tools can load."""

from __future__ import annotations

import json
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


def save_adapter_folder(policy: Policy, source: Path, folder: Path) -> None:
    """Writes the adapters as a folder in PEFT's format; a collective.

    Args:
        policy: with ``actor.lora``.
        source: the folder of the base's weights.
        folder: written to.

    Raises:
        RunError: the policy has no adapters, or a write fails; ``folder`` is complete or absent.
    """
    tensors = {
        f"base_model.model.{name}": tensor.to("cpu", copy=True).contiguous()
        for name, tensor in policy.export_adapters()
        if rank() == 0
    }
    lora = policy.lora
    assert lora is not None
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }

    def write() -> None:
        if rank() == 0:
            with write_errors(folder):
                (temporary / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
                _save(tensors, temporary / "adapter_model.safetensors")

    with shared_folder(folder) as temporary:
        run_together(write)


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # carries the operating system's message
        raise OSError(str(error)) from error


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
            _save(tensors, temporary / _WEIGHTS)

    with shared_folder(folder) as temporary:
        run_together(write)
