"""Checks before a run that need the model's folder: weights, tokenizer, prompt lengths.

``python -m megatron_tlt.cli.preflight_model FOLDER [--whole]`` reads a launch config as JSON from stdin and prints its
findings as JSON. transformers counts tokens without torch. So this process does not import torch, which takes seconds,
unless a task names users' code.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from megatron_tlt.cli.preflight import WHOLE
from megatron_tlt.cli.preflight_tasks import Findings, check_tasks
from megatron_tlt.config.import_path import is_import_path
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.tokenizer import load_tokenizer, prompt_lengths
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.architecture import read_sizes
from megatron_tlt.models.hf_folder import MEGATRON_PART, SafetensorsFolder, is_megatron_checkpoint, side_files_of
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.tasks.types import Problem

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_SHOWS_PROGRESS = 5000  # prompts; fewer are counted within a second


def check_with_model(config: TltConfig, folder: Path, *, whole: bool = True) -> Findings:
    """Checks the tasks, including prompt lengths, and the model's folder, of either kind.

    ``whole``: the folder must hold weights and a tokenizer; otherwise a note lists the missing parts.
    """
    found = Findings()
    side_files = side_files_of(folder)
    if whole or is_megatron_checkpoint(folder) or any(folder.glob("*.safetensors")):
        try:
            check_weights(folder)
        except ConfigError as error:
            found.add(error)
    else:
        found.notes.append(f"not checked: weights, because there is no *.safetensors in {folder}")
    try:
        check_teacher(config.algorithm.kl.reference, side_files)
    except ConfigError as error:
        found.add(error)
    why = "the tokenizer cannot be read"
    tokenizer = None
    if whole or any((side_files / name).is_file() for name in _TOKENIZER_FILES):
        try:
            tokenizer = load_tokenizer(side_files)
        except ConfigError as error:
            found.add(error)
    else:
        why = f"there is no tokenizer in {side_files}"
    if tokenizer is None:
        found += check_tasks(config)
        found.notes.append(f"not checked: prompts' lengths in tokens, because {why}")
        return found

    def lengths(problems: Sequence[Problem]) -> list[int | str]:
        hidden = len(problems) < _SHOWS_PROGRESS or not sys.stderr.isatty()
        with tqdm(total=len(problems), desc="counting tokens", unit="prompt", leave=False, disable=hidden) as bar:
            return prompt_lengths(tokenizer, problems, bar.update)

    found += check_tasks(config, lengths)
    return found


def check_weights(folder: Path) -> None:
    """Checks that a model folder holds every weight its config requires; reads headers only.

    Raises:
        ConfigError: a weight is missing, truncated or of another shape.
    """
    file = side_files_of(folder) / "config.json"
    if is_megatron_checkpoint(folder):
        if not any((folder / MEGATRON_PART).glob("*.distcp")):
            raise ConfigError(f"{folder / MEGATRON_PART}: no *.distcp in it; a Megatron checkpoint is needed")
        return
    if not file.is_file():
        raise ConfigError(f"model.path: no config.json in {folder}; allowed: a Hugging Face model folder")
    SafetensorsFolder(folder, "np").check(WeightMap(read_sizes(file, str(file)), str(file)))


def check_teacher(teacher: Path | None, side_files: Path) -> None:
    """Checks a reference policy of its own against the model whose ``config.json`` is in ``side_files``.

    Raises:
        ConfigError: it lacks weights, or its vocabulary has another size.
    """
    if teacher is None:
        return
    key = "algorithm.kl.reference"
    try:
        check_weights(teacher)
        same = _vocabulary(teacher) in (None, _vocabulary(side_files))
        sizes = [read_sizes(folder / "config.json", str(folder)) for folder in (teacher, side_files)]
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('model.path: ')}") from error
    if not same:
        raise ConfigError(f"{key}: {teacher}'s tokenizer.json has other tokens than the policy's; allowed: the same")
    if sizes[0].vocab_size != sizes[1].vocab_size:
        raise ConfigError(
            f"{key}: {teacher} has a vocabulary of {sizes[0].vocab_size} tokens; allowed: the policy's, "
            f"{sizes[1].vocab_size}, as it scores the policy's tokens"
        )


def _vocabulary(folder: Path) -> object:
    """The tokens and ids in a folder's tokenizer.json; None if there is none."""
    try:
        return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def main() -> None:
    """Prints the findings as the last line of stdout."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command reports Ctrl-C
    config = TltConfig.model_validate_json(sys.stdin.read())
    if not any(task.kind == "python" or is_import_path(task.verifier) for task in config.tasks):
        # users' modules may need it
        sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then treats torch as not installed
    print(json.dumps(asdict(check_with_model(config, Path(sys.argv[1]), whole=WHOLE in sys.argv[2:]))))


if __name__ == "__main__":
    main()
