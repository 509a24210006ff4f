"""``tlt export-drafter SOURCE TARGET``: writes the drafter of a run or warm-up as a folder for stock vLLM."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_tlt.errors import ConfigError

_DTYPES = ("float32", "bfloat16", "float16")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("export-drafter", help="export a trained drafter to a folder that stock vLLM serves")
    parser.add_argument("source", type=Path, help="a run's or warm-up's folder, or a drafter's own folder")
    parser.add_argument("target", type=Path, help="output folder; must not exist")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the weights (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from megatron_tlt.checkpoint.files import atomic_folder
    from megatron_tlt.drafter.checkpoint import load_without_target
    from megatron_tlt.drafter.folder import NEWEST_DRAFTER, save_drafter
    from megatron_tlt.drafter.warmup import ABOUT, TRAINING

    source, target = arguments.source, arguments.target
    if target.exists():
        raise ConfigError(f"{target}: exists already; allowed: a folder that does not exist")
    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder; a drafter's training checkpoint or folder is needed")
    if (source / ABOUT).is_file():
        source = source / TRAINING
    elif (source / NEWEST_DRAFTER).is_dir():
        source = source / NEWEST_DRAFTER
    model = load_without_target(source)
    with atomic_folder(target) as folder:
        save_drafter(model, folder, getattr(torch, arguments.dtype))
    print(f"written: {target} (method {model.kind}, {sum(p.numel() for p in model.parameters())} weights)")
    return 0
