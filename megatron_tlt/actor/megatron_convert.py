"""Converts Hugging Face folders to Megatron distributed checkpoints and back, with one parameter in memory at a time.

A Megatron checkpoint is a folder with ``actor/`` (read by Megatron-Core's ``dist_checkpointing``), ``hf/`` (config,
tokenizer and generation config) and a manifest; a run's checkpoints have the same form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from safetensors.torch import save_file

from megatron_tlt.checkpoint.chunks import Chunk, ChunkReader, write_chunks
from megatron_tlt.checkpoint.metadata import refuse_adapters
from megatron_tlt.checkpoint.shared import shared_folder
from megatron_tlt.checkpoint.weights import verify_weights
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf_folder import (
    INDEX,
    MEGATRON_PART,
    SIDE_FILES,
    SafetensorsFolder,
    copy_side_files,
    is_megatron_checkpoint,
    read_hf_config,
)
from megatron_tlt.models.weight_map import Piece, WeightMap
from megatron_tlt.platform.device import barrier, rank, warn, world_size

MAX_FILE_BYTES = 1 << 30

Progress = Callable[[int, int], None]
"""Called for each finished parameter: its bytes, and the total bytes of this process."""


def _silent(count: int, total: int) -> None:
    pass


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.+)")
_SAVED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def checkpoint_box(weights: WeightMap, parameter: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Location of a parameter in Megatron-Core's checkpoint: key, sizes of prepended axes, its position on them.

    All layers (and experts) of one kind form one tensor; norms are saved under Transformer Engine's names.
    """
    found = _LAYER.fullmatch(parameter)
    if found is None:
        return parameter, (), ()
    layers, layer = weights.num_layers, int(found[1])
    if found[2]:
        key = f"decoder.layers.mlp.experts.experts.{found[3]}"
        return key, (layers, weights.num_experts), (layer, int(found[2]))
    fused = found[3] == "input_layernorm.weight" or not weights.num_experts
    tail = _SAVED_NORMS.get(found[3], found[3]) if fused else found[3]
    return f"decoder.layers.{tail}", (layers,), (layer,)


def _shares(weights: WeightMap, count: int) -> list[list[str]]:
    """Divides the parameters into ``count`` consecutive groups with about equal numbers of weights."""
    total, done = weights.num_parameters, 0
    shares: list[list[str]] = [[] for _ in range(count)]
    for name, shape in weights.parameters.items():
        shares[min(count - 1, (done + prod(shape) // 2) * count // total)].append(name)
        done += prod(shape)
    return shares


def _assemble(source: SafetensorsFolder, shape: Sequence[int], pieces: Sequence[Piece]) -> torch.Tensor:
    if len(pieces) == 1:
        return source.read(pieces[0].name)
    whole = torch.empty(tuple(shape), dtype=source.dtype(pieces[0].name))
    for piece in pieces:
        part = source.read(piece.name, piece.dim, piece.start, piece.length)
        whole.narrow(piece.dim, piece.offset, piece.length).copy_(part)
    return whole


def _chunk(weights: WeightMap, source: SafetensorsFolder, parameter: str) -> Chunk:
    shape = weights.parameters[parameter]
    key, axes, place = checkpoint_box(weights, parameter)
    pieces = weights.pieces(parameter, 0, 1)
    lead = (1,) * len(axes)
    return Chunk(
        key,
        axes + shape,
        place + (0,) * len(shape),
        lead + shape,
        source.dtype(pieces[0].name),
        lambda: _assemble(source, shape, pieces).view(lead + shape),
    )


def hf_to_megatron(source: Path, target: Path, done: Progress = _silent) -> None:
    """Writes a Megatron checkpoint folder; a collective over any number of processes, which share the work.

    Raises:
        ConfigError: ``source`` is not a Hugging Face folder of a supported architecture, or its weights do not fit it.
        RunError: a file operation fails; ``target`` is complete or absent.
    """
    weights = WeightMap(read_hf_config(source), str(source))
    folder = SafetensorsFolder(source)
    folder.check(weights)
    chunks = [_chunk(weights, folder, name) for name in _shares(weights, world_size())[rank()]]
    total = sum(chunk.num_bytes for chunk in chunks)

    def write(temporary: Path) -> None:
        if rank() == 0:
            (temporary / MEGATRON_PART).mkdir()
            (temporary / SIDE_FILES).mkdir()
        barrier()
        write_chunks(temporary / MEGATRON_PART, chunks, lambda count: done(count, total))
        if rank() == 0:
            # Non-tensor state: empty, in the two files that Megatron-Core requires.
            save_config(CheckpointingConfig("torch_dist", 1), str(temporary / MEGATRON_PART))
            torch.save({}, temporary / MEGATRON_PART / "common.pt")
            copy_side_files(source, temporary / SIDE_FILES)

    _write_folder(target, write)


def megatron_to_hf(source: Path, target: Path, side_files: Path | None = None, done: Progress = _silent) -> None:
    """Writes a Hugging Face folder; a collective over any number of processes, each with its files.

    Args:
        source: a Megatron checkpoint folder; with optimizer state, only the weights are read.
        target: the output folder.
        side_files: folder with config and tokenizer, if ``source`` has none in ``hf/``.
        done: called with the progress.

    Raises:
        ConfigError: no config is found, its architecture is not supported, or the checkpoint has adapters.
        RunError: the checkpoint lacks a tensor or is damaged, or a file operation fails; ``target`` is complete or
            absent.
    """
    config_folder = side_files or source / SIDE_FILES
    weights = WeightMap(read_hf_config(config_folder), str(config_folder))
    reader = ChunkReader(source / MEGATRON_PART)
    refuse_adapters(source / MEGATRON_PART)
    sizes = {
        name: prod(shape) * reader.dtype(checkpoint_box(weights, name)[0]).itemsize
        for name, shape in weights.parameters.items()
    }
    files = list(_output_files(sizes, world_size()))
    names = _file_names(len(files))
    own = list(zip(names, files, strict=True))[rank() :: world_size()]
    total = sum(sizes[parameter] for _, parameters in own for parameter in parameters)

    def write(temporary: Path) -> None:
        for name, parameters in own:
            tensors: dict[str, torch.Tensor] = {}
            for parameter in parameters:
                tensors |= _split_parameter(weights, reader, parameter)
                done(sizes[parameter], total)
            save_file(tensors, temporary / name, metadata={"format": "pt"})
        if rank() == 0:
            copy_side_files(config_folder, temporary)
            if len(files) > 1:
                _write_index(temporary / INDEX, weights, names, files, sum(sizes.values()))

    _write_folder(target, write)


def _split_parameter(weights: WeightMap, reader: ChunkReader, parameter: str) -> dict[str, torch.Tensor]:
    """Splits a parameter into its Hugging Face tensors."""
    key, axes, place = checkpoint_box(weights, parameter)
    pieces = weights.pieces(parameter, 0, 1)
    shape = weights.parameters[parameter]
    whole = reader.read(key, place + (0,) * len(shape), (1,) * len(axes) + shape).view(shape)
    if len(pieces) == 1:
        return {pieces[0].name: whole}
    tensors = {piece.name: torch.empty(weights.shapes[piece.name], dtype=whole.dtype) for piece in pieces}
    for piece in pieces:
        part = whole.narrow(piece.dim, piece.offset, piece.length)
        tensors[piece.name].narrow(piece.dim, piece.start, piece.length).copy_(part)
    return tensors


def _output_files(sizes: dict[str, int], processes: int) -> Iterator[list[str]]:
    """Parameters by file: no file exceeds the bound except for a single larger parameter; enough for all processes."""
    bound = min(MAX_FILE_BYTES, -(-sum(sizes.values()) // processes))
    file: list[str] = []
    used = 0
    for name, size in sizes.items():
        if file and used + size > bound:
            yield file
            file, used = [], 0
        file.append(name)
        used += size
    yield file


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _write_index(
    path: Path, weights: WeightMap, names: Sequence[str], files: Sequence[Sequence[str]], total: int
) -> None:
    place = {
        piece.name: name
        for name, parameters in zip(names, files, strict=True)
        for parameter in parameters
        for piece in weights.pieces(parameter, 0, 1)
    }
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """All ranks write into one temporary folder, which becomes ``target`` at the end, with a manifest."""
    if target.exists():
        raise ConfigError(f"{target}: exists already; allowed: a folder that does not exist")
    with shared_folder(target) as temporary:
        write(temporary)


def convert(
    source: Path, target: Path, side_files: Path | None = None, done: Progress = _silent, *, verify: bool = True
) -> None:
    """Converts in the direction given by the kind of ``source``; a collective.

    ``verify`` first compares ``source`` with its manifest.

    Raises:
        ConfigError: ``source`` is neither kind of folder, or ``target`` exists.
        RunError: ``source`` is damaged.
    """
    if verify:
        verify_weights(source)
    else:
        warn(f"the weights in {source} are not verified (--no-verify)")
    if is_megatron_checkpoint(source):
        megatron_to_hf(source, target, side_files, done)
    elif (source / "config.json").is_file():
        hf_to_megatron(source, target, done)
    else:
        raise ConfigError(
            f"{source}: neither a Hugging Face folder (config.json, *.safetensors) nor a Megatron checkpoint "
            f"({MEGATRON_PART}/metadata.json)"
        )
