"""Drafter folders that stock vLLM can load: written, read, and initialized from the target's last layer.

``config.json`` describes a one-layer Llama. ``model.safetensors`` holds only the trainable tensors; vLLM shares the
target's embedding (and LM head, for EAGLE) with the drafter.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import LlamaConfig, PretrainedConfig

from megatron_tlt.checkpoint.manifest import rewriting
from megatron_tlt.checkpoint.weights import verify_weights
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.drafter_kinds import KINDS, kind_of
from megatron_tlt.config.import_path import load_object
from megatron_tlt.drafter.eagle3 import NUM_AUX_LAYERS
from megatron_tlt.drafter.model import DraftModel, Kind, SharedWeights, TargetTensors, as_dtype
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import ROPE_TYPES, family_of, head_dim, rope_parameters
from megatron_tlt.models.hf_folder import SafetensorsFolder, read_hf_config
from megatron_tlt.platform.files import atomic_write_bytes

NEWEST_DRAFTER = Path("drafter", "newest")
"""The newest drafter's folder in a run's folder."""

WEIGHTS = "model.safetensors"
#: config.json key: the import path of a user-defined kind, whose architecture may equal that of another kind.
KIND_KEY = "drafter_kind"
_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# Options that the drafter's layer lacks: a folder that enables one is of another model.
_FOREIGN = ("attention_bias", "mlp_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYER_WEIGHTS = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The default auxiliary layers: low, middle, high (2, n / 2, n - 3), spread out in small models.

    Raises:
        ConfigError: the target has fewer than two layers, too few for three different auxiliary layers.
    """
    aux_layers = (2, num_layers // 2, num_layers - 3)
    if aux_layers[0] < aux_layers[1] < aux_layers[2]:
        return aux_layers
    if num_layers < NUM_AUX_LAYERS - 1:
        raise ConfigError(
            f"the target has {num_layers} layers; the drafter reads {NUM_AUX_LAYERS} hidden states, allowed: at least 2"
        )
    return tuple(range(NUM_AUX_LAYERS)) if num_layers < NUM_AUX_LAYERS + 1 else (1, num_layers // 2, num_layers - 1)


def aux_layers_of(config: PretrainedConfig) -> tuple[int, ...]:
    """The auxiliary layers of a drafter's config; empty if it has none.

    Published heads name them in ``eagle_config`` or beside it. vLLM's second model runner reads only the latter.

    Raises:
        ConfigError: the two places name different layers.
    """
    within = (getattr(config, "eagle_config", None) or {}).get(_LAYERS_KEY)
    beside = getattr(config, _LAYERS_KEY, None)
    if within and beside and list(within) != list(beside):
        raise ConfigError(f"{_LAYERS_KEY} is {beside}, but in eagle_config {within}; allowed: the same, or one of them")
    return tuple(beside or within or ())


def draft_config(
    target: PretrainedConfig, kind: Kind, aux_layers: Sequence[int] | None = None, draft_vocab_size: int | None = None
) -> LlamaConfig:
    """Build a drafter's config from the target's sizes, epsilon and rotary positions, with one dense Llama layer.

    Args:
        target: the target's config.
        kind: name or import path of the drafter's kind.
        aux_layers: ascending layers whose input the drafter reads (:class:`~megatron_tlt.drafter.eagle3.Eagle3`).
        draft_vocab_size: number of tokens it can draft if it has its own LM head; None for all.

    Raises:
        ConfigError: the target's family is unsupported, or it has fewer layers or tokens than asked for.
    """
    family_of(target, "target")
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=head_dim(target),
        hidden_act="silu",
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=rope_parameters(target),
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=None,
    )
    form = kind_of(kind)
    config.architectures = [form.architecture]
    if kind not in KINDS:
        setattr(config, KIND_KEY, kind)
    if form.num_aux_layers:
        aux_layers = default_aux_layers(target.num_hidden_layers) if aux_layers is None else tuple(aux_layers)
        inside = all(0 <= layer <= target.num_hidden_layers for layer in aux_layers)
        if len(set(aux_layers)) != NUM_AUX_LAYERS or list(aux_layers) != sorted(aux_layers) or not inside:
            raise ConfigError(
                f"{form.title} reads layers {tuple(aux_layers)}; allowed: {NUM_AUX_LAYERS} different ones, ascending, "
                f"from 0 to {target.num_hidden_layers}"
            )
        config.eagle_config = {"use_aux_hidden_state": True, _LAYERS_KEY: list(aux_layers)}
        setattr(config, _LAYERS_KEY, list(aux_layers))
    if form.own_head:
        if draft_vocab_size is not None and draft_vocab_size > target.vocab_size:
            raise ConfigError(
                f"draft_vocab_size is {draft_vocab_size}; allowed: at most the target's vocabulary, {target.vocab_size}"
            )
        config.draft_vocab_size = draft_vocab_size or target.vocab_size
    return config


def model_class(kind: Kind) -> type[DraftModel]:
    """The model class of a kind.

    Raises:
        ConfigError: the kind does not exist, or its import path does not name a model of that kind.
    """
    path = kind_of(kind).model

    def is_model(item: Any) -> bool:
        return isinstance(item, type) and issubclass(item, DraftModel) and not inspect.isabstract(item)

    what = "a subclass of megatron_tlt.drafter.model.DraftModel with all of its methods"
    cls: type[DraftModel] = load_object(path, f"model of drafter.kind {kind}", is_model, "class", what)
    if cls.kind != kind:
        raise ConfigError(f"model of drafter.kind {kind}: {path} has kind {cls.kind!r}; allowed: {kind!r}")
    return cls


def build_drafter(config: PretrainedConfig, kind: Kind, shared: SharedWeights) -> DraftModel:
    """An untrained drafter in float32 with arbitrary weights; torch's random state is not changed.

    Raises:
        ConfigError: as ``model_class``.
    """
    cls = model_class(kind)
    with torch.random.fork_rng(devices=[]):
        return cls(config, shared)


def _target_layer(weights: TargetTensors, num_layers: int) -> dict[str, torch.Tensor]:
    """The tensors that the target's last layer shares with a dense Llama layer, in float32."""
    at = f"model.layers.{num_layers - 1}."
    names = [*_LAYER_WEIGHTS, "input_layernorm.weight"]
    return {name: weights.read(at + name).float() for name in names if at + name in weights}


def _first_weights(model: DraftModel, layer: dict[str, torch.Tensor], norm: torch.Tensor, std: float) -> dict[str, Any]:
    """A drafter's initial weights: ``fc`` passes the feature through, and the layer adds nothing yet.

    The output projections are zero, because the target's last layer adds vectors of another space than the features:
    with outliers in that stream, an unrolled drafter would diverge. The other projections and norms are copied from
    that layer, except those that read the embedding. These have no counterpart in the target and come from N(0, std).
    """
    hidden = int(model.config.hidden_size)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        tail = name.removeprefix("midlayer.").removeprefix("layers.0.")
        if tail in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            found[name] = torch.zeros_like(parameter)
        elif tail == "fc.weight":
            found[name] = torch.zeros_like(parameter)
            found[name][:, -hidden:] = torch.eye(hidden)
        elif tail == "hidden_norm.weight":
            found[name] = layer["input_layernorm.weight"]
        elif tail == "input_layernorm.weight":  # EAGLE-3's norm of the embedding, not the target's norm of that name
            found[name] = torch.ones(hidden)
        elif tail == "norm.weight":
            found[name] = norm
        elif tail == "d2t":
            found[name] = torch.zeros_like(parameter)
        elif tail == "lm_head.weight":
            found[name] = model.shared.head[: len(parameter)].float()
        elif tail in layer and parameter.shape == layer[tail].shape:
            found[name] = layer[tail]
        elif parameter.ndim == 1:
            found[name] = torch.ones_like(parameter)
        else:
            found[name] = torch.empty(parameter.shape).normal_(0.0, std)
            if tail in layer:  # a projection over [embedding; feature]
                found[name][:, -hidden:] = layer[tail]
    return found


def drafter_from_target(
    target: Path,
    kind: Kind,
    seed: int,
    aux_layers: Sequence[int] | None = None,
    weights: TargetTensors | None = None,
    draft_vocab_size: int | None = None,
) -> DraftModel:
    """A drafter in float32, initialized from the Hugging Face folder ``target`` to repeat the target's feature.

    The first training step chooses the feature's scale and, from its data, which ``draft_vocab_size`` tokens can be
    drafted (:func:`~megatron_tlt.drafter.start.calibrate_start`). ``weights`` overrides the folder's weights. The same
    seed gives the same weights.

    Raises:
        ConfigError: the folder cannot be read, or its model is not supported.
    """
    target_config, weights = read_hf_config(target), weights or SafetensorsFolder(target)
    shared = SharedWeights.of(weights, bool(target_config.tie_word_embeddings))
    model = build_drafter(draft_config(target_config, kind, aux_layers, draft_vocab_size), kind, shared)
    layer = _target_layer(weights, target_config.num_hidden_layers)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        std = float(getattr(target_config, "initializer_range", 0.02))
        model.load_state_dict(_first_weights(model, layer, weights.read("model.norm.weight").float(), std))
    model.from_target = True
    return model


def write_config(model: DraftModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the ``config.json`` of a drafter whose weights are stored in ``dtype``.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    config = model.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    atomic_write_bytes(folder / "config.json", json.dumps(config, indent=2, sort_keys=True).encode())


def save_drafter(model: DraftModel, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write ``config.json``, ``model.safetensors`` and a manifest; the weights are replaced atomically.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    tensors = {name: as_dtype(tensor.detach(), dtype).cpu().contiguous() for name, tensor in model.state_dict().items()}
    with rewriting(folder) as staged:
        write_config(model, staged, dtype)
        atomic_write_bytes(staged / WEIGHTS, save(tensors, metadata={"format": "pt"}))


def foreign_options(config: PretrainedConfig) -> list[str]:
    """Enabled options of a config that the drafter's layer does not support, one line each."""
    return [f"{key} is {getattr(config, key)!r}; allowed: false" for key in _FOREIGN if getattr(config, key, False)]


def _differences(own: PretrainedConfig, expected: PretrainedConfig) -> list[str]:
    """Differences between a drafter's config and the one its target requires, one line each.

    Layer sizes and rotary positions may differ: published heads of targets with scaled positions use plain ones.
    """
    keys = ("hidden_size", "vocab_size", "num_hidden_layers", "architectures")
    wrong = [
        f"{key} is {found!r}; the target asks for {allowed!r}"
        for key in keys
        if (found := getattr(own, key, None)) != (allowed := getattr(expected, key))
    ]
    rope_type = rope_parameters(own)["rope_type"]
    if rope_type not in ROPE_TYPES:
        wrong.append(f"rope_type is {rope_type!r}; allowed: {', '.join(map(repr, ROPE_TYPES))}")
    return wrong + foreign_options(own)


def load_drafter(folder: Path, target: PretrainedConfig, kind: Kind, shared: SharedWeights) -> DraftModel:
    """Load the drafter in ``folder`` for a target, in float32.

    An embedding in the folder (and, for EAGLE, an LM head) is ignored; the target's are used. ``t2d``, the mask of
    target tokens that can be drafted, is ignored too.

    Raises:
        ConfigError: the folder cannot be read or is for another target: hidden size (both are named), vocabulary,
            auxiliary layers, an unsupported option, or a tensor that is missing or has another shape.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"drafter folder {folder}: no config.json in it")
    try:
        own = LlamaConfig(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    try:
        aux_layers = aux_layers_of(own) if kind_of(kind).num_aux_layers else ()
        config = draft_config(target, kind, aux_layers or None, getattr(own, "draft_vocab_size", None))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    if wrong := _differences(own, config):
        raise ConfigError("\n".join(f"{file}: {line}" for line in wrong))
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        setattr(config, key, getattr(own, key))
    config.rope_parameters = rope_parameters(own)
    model = build_drafter(config, kind, shared)
    weights = SafetensorsFolder(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in shapes.items():
        if weights.shape(name) != shape:
            raise ConfigError(f"{folder}: tensor {name!r} has shape {weights.shape(name)}; allowed: {shape}")
    model.load_state_dict({name: as_dtype(weights.read(name), torch.float32) for name in shapes})
    _check_vocabulary(model, folder)
    return model


def _check_vocabulary(model: DraftModel, folder: Path) -> None:
    if model.draft_ids_D is None:
        return
    if len(set(model.draft_ids_D.tolist())) < len(model.draft_ids_D):
        raise ConfigError(f"{folder}: tensor 'd2t' names a token twice; allowed: each once")
    lowest, highest, largest = int(model.draft_ids_D.min()), int(model.draft_ids_D.max()), model.config.vocab_size - 1
    if lowest < 0 or highest > largest:
        raise ConfigError(f"{folder}: tensor 'd2t' names tokens {lowest} to {highest}; allowed: 0 to {largest}")


def require_chosen(model: DraftModel, folder: Path) -> None:
    """Require that a drafter of a part of the vocabulary was trained, since training chooses that part.

    Raises:
        ConfigError: the part was never chosen.
    """
    table = dict(model.named_buffers()).get("d2t")
    if table is not None and not table.any():
        raise ConfigError(f"{folder}: the drafter was never trained: which tokens it drafts ('d2t') is not chosen")


def first_drafter(config: DrafterConfig, target: Path, seed: int, weights: TargetTensors | None = None) -> DraftModel:
    """The drafter that a config starts from: loaded from its folder, or initialized from the target's last layer.

    If the config has a folder, this is a collective over the world that verifies the weights with the manifest.
    ``target`` is the target's Hugging Face folder; it needs no weights if ``weights`` is given.

    Raises:
        ConfigError: as :func:`load_drafter` and :func:`drafter_from_target`, or the config's auxiliary layers or
            vocabulary size differ from the folder's.
        RunError: the drafter's weights are damaged.
    """
    if config.path is None:
        return drafter_from_target(
            target, config.kind, seed, config.aux_hidden_state_layer_ids, weights, config.draft_vocab_size
        )
    verify_weights(config.path)
    target_config = read_hf_config(target)
    shared = SharedWeights.of(weights or SafetensorsFolder(target), bool(target_config.tie_word_embeddings))
    model = load_drafter(config.path, target_config, config.kind, shared)
    require_chosen(model, config.path)
    wanted, found = config.aux_hidden_state_layer_ids, list(aux_layers_of(model.config))
    if wanted not in (None, found):
        raise ConfigError(f"drafter.aux_hidden_state_layer_ids is {wanted}; {config.path} was made for {found}")
    if config.draft_vocab_size not in (None, own := getattr(model.config, "draft_vocab_size", None)):
        raise ConfigError(f"drafter.draft_vocab_size is {config.draft_vocab_size}; {config.path} was made with {own}")
    return model
