"""Models built by a recipe: from scratch or from a pretrained model, by supervised training."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.config.model import require_model_folder
from megatron_tlt.config.schema import ArchitectureConfig, RecipeConfig, TltConfig
from megatron_tlt.config.task import TaskConfig

RECIPE_FILE = "recipe.json"
_DIGESTED_BYTES = 1 << 20


def warm_up_optimizer(config: TltConfig) -> dict[str, Any]:
    """The keys of ``actor`` that say the warm-up's optimizer: the actor's own, unless the recipe sets another class."""
    assert config.model.recipe is not None
    actor, own = config.actor, config.model.recipe.supervised.optimizer
    # A warm-up's own optimizer is adam or sgd, which take no arguments.
    inherited, split = "optimizer" not in own, actor.optimizer_split
    if split is not None and "lr" in own and "lr" in actor.optimizer:
        # two classes keep the ratio of their rates
        split = split.model_copy(update={"lr": split.lr * float(own["lr"]) / float(actor.optimizer["lr"])})
    return {
        "optimizer": {**actor.optimizer, **own},
        "optimizer_arguments": actor.optimizer_arguments if inherited else {},
        "optimizer_sharding": actor.optimizer_sharding if inherited else "auto",
        "optimizer_split": split if inherited else None,
        "optimizer_loss": "policy",
    }


def _warm_up_described(config: TltConfig) -> dict[str, Any]:
    found = warm_up_optimizer(config)
    described = {name: found[name] for name in ("optimizer", "optimizer_arguments")}
    if (split := found["optimizer_split"]) is not None:
        described["optimizer_split"] = split.model_dump(mode="json")
    return described


def recipe_description(config: TltConfig) -> str:
    """Everything the model depends on, as JSON: recipe, tasks, processes, layout, the warm-up's optimizer."""
    assert config.model.recipe is not None
    recipe = config.model.recipe
    # solutions of such tasks ended differently in earlier releases
    formatted = any(task.answer_format is not None for task in config.tasks)
    parts = {
        "recipe": recipe.model_dump(mode="json", exclude={"cache_dir": True, "base": True, "supervised": {"data"}}),
        **({} if recipe.base is None else {"base": _contents(recipe.base)}),
        **({"conversations": data} if (data := _digests(recipe.supervised.data)) else {}),
        "tasks": [_task(task) for task in config.tasks],
        "world_size": config.launcher.world_size,
        "megatron": config.actor.megatron,
        **_warm_up_described(config),
        **({"solutions": "in the answer format"} if formatted else {}),
    }
    return json.dumps(parts, sort_keys=True, indent=1)


def _task(task: TaskConfig) -> dict[str, Any]:
    """As earlier releases wrote it, so that their folders are found: solutions are not verified."""
    later = {"environment": None, "held_out": "prompt", "budget": None, "tier_file": None, "tier_mix": None}
    fields = {**task.without_pool.model_dump(mode="json"), "verifier": "math"}
    return {name: value for name, value in fields.items() if name not in later or value != later[name]}


def recipe_folder(config: TltConfig) -> Path:
    """The path of the recipe's model, built or not: a folder named by a hash of everything it depends on."""
    assert config.model.recipe is not None
    digest = hashlib.blake2b(recipe_description(config).encode(), digest_size=6).hexdigest()
    return config.model.recipe.cache_dir / digest


def _contents(folder: Path) -> dict[str, list[int | str]]:
    """Size and digest of each file of the model. Of weights only the first MiB is read: any training changes it."""
    files = [file for suffix in ("json", "jinja", "safetensors") for file in folder.glob(f"*.{suffix}")]
    found: dict[str, list[int | str]] = {}
    for file in sorted(files):
        with file.open("rb") as opened:
            digest = hashlib.blake2b(opened.read(_DIGESTED_BYTES), digest_size=8).hexdigest()
        found[file.name] = [file.stat().st_size, digest]
    return found


def _digests(files: Sequence[Path]) -> list[str]:
    """SHA-256 sums; a file that cannot be read has none, and is reported by the checks before a run."""
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            stat = file.stat()
            found.append(_digest(file, stat.st_mtime_ns, stat.st_size))
    return found


@functools.cache  # a command asks for the recipe's folder several times
def _digest(file: Path, mtime_ns: int, size: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def model_folder(config: TltConfig) -> Path:
    """The folder of the policy's initial weights.

    Raises:
        ConfigError: only ``model.architecture`` is given, or there is no such folder.
    """
    require_model_folder(config)
    return config.model.path if config.model.path is not None else recipe_folder(config)


def write_untrained(
    folder: Path, architecture: ArchitectureConfig, recipe: RecipeConfig, vocab_size: int, eos_id: int
) -> None:
    """Writes a Qwen2 model with random weights drawn from the recipe's seed into ``folder``."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fields = architecture.model_dump(exclude={"rope_theta"})
    hf_config = Qwen2Config(
        **fields,
        vocab_size=vocab_size,
        eos_token_id=eos_id,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        Qwen2ForCausalLM(hf_config).save_pretrained(folder)
