"""``tlt eval CONFIG [key.path=value ...]``: evaluates a run's checkpoint; the run may continue training."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatron_tlt.cli import preflight, runs
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.limit import PromptLimit


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("eval", help="evaluate a run's checkpoint on the held-out problems or on a file")
    runs.add_config_arguments(parser)
    parser.add_argument("--checkpoint", metavar="PATH|N", help="a checkpoint's folder or a step (default: newest)")
    parser.add_argument("--data", metavar="FILE", help="a prompt file (default: the tasks' held-out problems)")
    parser.add_argument("--verifier", default="math", help="verifier of --data, or an import path (%(default)s)")
    parser.add_argument("--json", metavar="F", help="also write the result to F")
    parser.add_argument("--samples", metavar="F", help="also write some responses to F, as in a run's samples.jsonl")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = preflight.load_checked(arguments.config, arguments.overrides, trains=False)
    from megatron_tlt.rewards.verifiers import verifiers_of
    from megatron_tlt.trainer.evaluation import EvaluationRequest

    for option, file in (("--json", arguments.json), ("--samples", arguments.samples)):
        if file is not None:
            check_writable(option, Path(file), config.run.dir)
    if arguments.samples is not None and config.observe.samples_per_task == 0:
        raise ConfigError("--samples: observe.samples_per_task is 0; allowed with --samples: 1 or more")
    checkpoint = None if arguments.checkpoint is None else checkpoint_folder(arguments.checkpoint, config.run.dir)
    request = EvaluationRequest(checkpoint, arguments.data, arguments.verifier, arguments.json, arguments.samples)
    verifiers_of(request.tasks)
    if request.data is not None:
        request.problems(config.run.seed, _limit(config))
    return runs.start_beside("eval", "evaluate", config, asdict(request), show=arguments.traceback)


def check_writable(option: str, file: Path, run: Path) -> None:
    """Checks an output file before ranks start.

    Raises:
        ConfigError: the file is a folder or belongs to the run, or its folder is missing or not writable.
    """
    if runs.is_run_file(run, file):
        raise ConfigError(f"{option}: {file} belongs to the run; allowed: a file that no run writes")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"{option}: cannot write {file}; allowed: a file in an existing, writable folder")


def checkpoint_folder(which: str, run: Path) -> str:
    """The folder of a step of the run, or ``which`` itself; raises ConfigError if it is not a checkpoint."""
    from megatron_tlt.models.hf_folder import is_megatron_checkpoint

    root = run / "checkpoints"
    folder = root / f"step_{int(which):06d}" if which.isdecimal() else Path(which)
    if not is_megatron_checkpoint(folder):
        there = ", ".join(sorted(path.name for path in root.glob("step_*"))) or "none"
        raise ConfigError(f"--checkpoint: {folder} is not a checkpoint; {root} contains: {there}")
    return str(folder)


def _limit(config: TltConfig) -> PromptLimit | None:
    """Limit for the prompts of a file; None if the recipe's model is not built yet: then the ranks check them."""
    from megatron_tlt.data.tokenizer import load_tokenizer, prompt_lengths
    from megatron_tlt.models.hf_folder import side_files_of
    from megatron_tlt.models.recipe import RECIPE_FILE, model_folder

    folder, rollout = model_folder(config), config.rollout
    if config.model.recipe is not None and not (folder / RECIPE_FILE).is_file():
        return None
    lengths = partial(prompt_lengths, load_tokenizer(side_files_of(folder)))
    return PromptLimit(rollout.max_prompt_tokens, rollout.filter_overlong_prompts, lengths)
