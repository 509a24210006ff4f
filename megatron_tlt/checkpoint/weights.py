"""Verifies the weights in a folder against its manifest before they are used."""

from __future__ import annotations

from pathlib import Path

from megatron_tlt.checkpoint.manifest import MANIFEST, PENDING, Sums, verify_manifest
from megatron_tlt.checkpoint.metadata import METADATA
from megatron_tlt.checkpoint.shared import with_shared_sums
from megatron_tlt.errors import RunError
from megatron_tlt.models.hf_folder import INDEX, MEGATRON_PART, is_megatron_checkpoint
from megatron_tlt.platform.device import show


# Config and tokenizer files are not compared: users edit them.
def _is_of_megatron(name: str) -> bool:
    folder, _, file = name.partition("/")
    return folder == MEGATRON_PART and (not file.startswith(".") or file == METADATA)  # NFS creates hidden files


def _is_safetensors(name: str) -> bool:
    return "/" not in name and (name.endswith(".safetensors") or name == INDEX)


def verify_weights(folder: Path) -> None:
    """Compares the weights in ``folder`` with its manifest; a collective over the world.

    Covers ``actor/`` of a Megatron checkpoint, and the safetensors files of a Hugging Face folder or a drafter's. If
    such a folder has no manifest, rank 0 prints a note, and safetensors itself checks headers and sizes. Raises
    RunError if a file differs, or a Megatron checkpoint has no manifest.
    """

    def check(sums: Sums) -> None:
        megatron = is_megatron_checkpoint(folder)
        has_manifest = any((folder / name).is_file() for name in (MANIFEST, PENDING))
        if not megatron and not has_manifest:
            show(f"note: {folder} has no {MANIFEST}: only headers and sizes of its weights are checked")
            return
        found = verify_manifest(folder, sums=sums, select=_is_of_megatron if megatron else _is_safetensors)
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            hint = f"the weights are damaged, or were changed without {MANIFEST}"
            if not has_manifest:
                hint = "weights that cannot be verified are not used unless verification is switched off"
            raise RunError(f"{found[0]}{more}: {hint}")

    with_shared_sums(check, None)
