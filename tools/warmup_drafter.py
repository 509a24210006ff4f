#!/usr/bin/env python3
"""Warms up an EAGLE or EAGLE-3 drafter for a target, offline; killed and started again, it goes on.

python tools/warmup_drafter.py --config launch/quickstart-cpu.yaml --steps 1000 --out FOLDER
python tools/warmup_drafter.py --model TARGET --data PAIRS.jsonl --kind eagle --steps 1000 --out FOLDER

With --config the head is the one of its drafter section, and its tasks give the data where --data does not.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_tlt.config.drafter_kinds import KINDS
from megatron_tlt.errors import ConfigError, TltError

SAMPLED = "sampled.jsonl"
# The target answers without a drafter: the one that a config names may be the one to be made.
_WITHOUT_DRAFTER = ("speculation={enabled: false}", "drafter=null", "spot=null")


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description="Warm up a drafter offline.")
    own.add_argument("--model", type=Path, help="the target, a Hugging Face folder (default: the config's model)")
    own.add_argument("--data", type=Path, help="JSON lines of prompt and response, each text or token ids")
    own.add_argument(
        "--config", type=Path, help="a launch config: its drafter section, and without --data its tasks for the target"
    )
    own.add_argument("--responses", type=int, default=512, help="how many it samples then")
    own.add_argument("--kind", choices=tuple(KINDS), help="default: the config's drafter.kind")
    own.add_argument("--steps", type=int, required=True, help="optimizer steps in all")
    own.add_argument("--out", type=Path, required=True, help="the warm-up's folder; FOLDER/drafter is for vLLM")
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--lr", type=float, help="default: the config's drafter.lr")
    own.add_argument("--loss", choices=("eagle", "kl", "tv"), help="default: the config's drafter.loss.name")
    own.add_argument("--entries-per-step", type=int, default=16)
    own.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    own.add_argument("--evaluate-every", type=int, default=100, help="steps between evaluations")
    own.add_argument("--depth", type=int, default=3, help="drafts in a row that are evaluated")
    return own


def sample_pairs(folder: Path, config: Any, count: int, seed: int, progress: Any) -> list[Any]:
    """The target's own responses to the config's training problems, sampled as a rollout samples them."""
    from megatron_tlt.config.speculation import SpeculationConfig
    from megatron_tlt.data.tokenizer import load_tokenizer
    from megatron_tlt.drafter import Pair
    from megatron_tlt.platform.device import initialize_distributed, prepare
    from megatron_tlt.rollout.vllm_engine import VllmEngine
    from megatron_tlt.tasks.mixture import build_sources
    from megatron_tlt.trainer.requests import one_request_each, training_sampling

    prepare()
    initialize_distributed()
    tokenizer = load_tokenizer(folder)
    problems = build_sources(config.tasks, "train", config.run.seed)
    sampling = training_sampling(config.rollout, tokenizer)
    requests = one_request_each(map(problems.problem, range(count)), tokenizer, sampling, "warm-up", seed)
    engine = VllmEngine(folder, config.rollout, SpeculationConfig(enabled=False), config.run.seed)
    progress.start("sampling", count)
    responses = engine.generate(requests, on_finished=lambda _: progress.advance())
    engine.shutdown()
    return [Pair(response.prompt_token_ids, tuple(response.token_ids)) for response in responses]


def _config(arguments: argparse.Namespace) -> Any:
    from megatron_tlt.config.loader import load_config

    if arguments.data is None and arguments.config is None:
        raise ConfigError("--data: not given, nor --config; one of them is needed")
    return None if arguments.config is None else load_config(arguments.config, _WITHOUT_DRAFTER)


def _drafter(arguments: argparse.Namespace) -> Any:
    """The config's drafter section with what the command line says instead."""
    from pydantic import ValidationError

    from megatron_tlt.config.drafter import DrafterConfig
    from megatron_tlt.config.source import deep_merge, read_inherited
    from megatron_tlt.config.violations import lines

    values = dict(read_inherited(arguments.config).get("drafter") or {}) if arguments.config is not None else {}
    values.pop("path", None)
    given = {"kind": arguments.kind, "lr": arguments.lr, "loss": {"name": arguments.loss} if arguments.loss else None}
    try:
        return DrafterConfig.model_validate(deep_merge(values, {k: v for k, v in given.items() if v is not None}))
    except ValidationError as error:
        problems = lines(DrafterConfig, error)
        raise ConfigError("\n".join(f"{arguments.config}: drafter.{line}" for line in problems)) from error


def _pairs(arguments: argparse.Namespace, folder: Path, vocab_size: int, config: Any, progress: Any) -> list[Any]:
    from megatron_tlt.data.tokenizer import load_tokenizer
    from megatron_tlt.drafter import read_pairs, write_pairs

    if arguments.data is not None:
        return read_pairs(arguments.data, vocab_size, lambda: load_tokenizer(folder))
    if arguments.responses < 1:
        raise ConfigError(f"--responses is {arguments.responses}; allowed: at least 1")
    cached = arguments.out / SAMPLED
    if not cached.is_file():
        write_pairs(cached, sample_pairs(folder, config, arguments.responses, arguments.seed, progress))
    return read_pairs(cached, vocab_size, lambda: load_tokenizer(folder))


def _source(arguments: argparse.Namespace, folder: Path, config: Any) -> dict[str, Any]:
    """What names the target and, where it samples, its data: another of them is another warm-up."""
    from megatron_tlt.models.hf_folder import SafetensorsFolder

    norm = SafetensorsFolder(folder).read("model.norm.weight")  # any training changes it
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    digest.update(norm.float().numpy().tobytes())
    about: dict[str, Any] = {"target": digest.hexdigest()}
    if arguments.data is None:
        about["sampled"] = {
            "responses": arguments.responses,
            "seed": [arguments.seed, config.run.seed],
            "tasks": [task.model_dump(mode="json") for task in config.tasks],
            "rollout": config.rollout.model_dump(mode="json"),
        }
    return about


def run(arguments: argparse.Namespace, should_stop: Callable[[], bool]) -> bool:
    """True where it came to its end."""
    import torch

    from megatron_tlt.drafter import TargetStates, WarmupPlan, aux_layers_of, first_drafter, warm_up
    from megatron_tlt.drafter.warmup import DRAFTER, check_same
    from megatron_tlt.models.hf_folder import read_hf_config
    from megatron_tlt.models.recipe import model_folder
    from megatron_tlt.observe.progress import Progress

    config = _config(arguments)
    if arguments.model is None and config is None:
        raise ConfigError("--model: not given, nor --config; one of them is needed")
    folder = arguments.model or model_folder(config)
    target = read_hf_config(folder)
    if arguments.lr is not None and not arguments.lr > 0:
        raise ConfigError(f"--lr is {arguments.lr}; allowed: above 0")
    plan = WarmupPlan(
        arguments.steps,
        entries_per_step=arguments.entries_per_step,
        save_every=arguments.save_every,
        evaluate_every=arguments.evaluate_every,
        depth=arguments.depth,
        seed=arguments.seed,
    )
    drafter = _drafter(arguments)
    about = _source(arguments, folder, config)
    check_same(arguments.out / "source", about)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Progress(0, arguments.steps) as progress:
        pairs = _pairs(arguments, folder, target.vocab_size, config, progress)
        model = first_drafter(drafter, folder, arguments.seed).to(device)
        model.share(model.shared.to(device))
        states = TargetStates(folder, aux_layers_of(model.config), device)
        report = warm_up(model, drafter, pairs, states, arguments.out, plan, progress, should_stop, about)
    if report is None:
        print(f"stopped; what was done is in {arguments.out}: the same command goes on", file=sys.stderr)
        return False
    print(f"{report.line}\nwritten: {arguments.out / DRAFTER}")
    return True


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    received: list[int] = []

    def remember(signum: int, _: Any) -> None:
        if received:  # asked twice: at once, with what was saved last
            raise KeyboardInterrupt
        received.append(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, remember)
    try:
        return 0 if run(arguments, lambda: bool(received)) else 128 + received[0]
    except TltError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 128 + received[0]


if __name__ == "__main__":
    sys.exit(main())
