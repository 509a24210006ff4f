#!/usr/bin/env python3
"""Records how long a policy's responses are, rollout by rollout; `tlt bench spot` replays it.

python tools/record_lengths.py --config launch/quickstart-deterministic.yaml --out lengths.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description="Record the lengths of a policy's responses to its training problems.")
    own.add_argument("--config", type=Path, required=True, help="launch config of the policy that is to be asked")
    own.add_argument("--model", type=Path, help="model folder (default: the config's)")
    own.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    own.add_argument("--rollouts", type=int, default=12)
    return own


def record(arguments: argparse.Namespace) -> dict[str, object]:
    from megatron_tlt.config.loader import load_config
    from megatron_tlt.config.speculation import SpeculationConfig
    from megatron_tlt.data.tokenizer import load_tokenizer
    from megatron_tlt.models.recipe import model_folder
    from megatron_tlt.observe.environment import describe_environment
    from megatron_tlt.platform.device import prepare
    from megatron_tlt.rollout.vllm_engine import VllmEngine
    from megatron_tlt.tasks.mixture import build_sources
    from megatron_tlt.trainer.requests import one_request_each, training_sampling

    prepare()
    config = load_config(arguments.config, [])
    folder = arguments.model or model_folder(config)
    engine = VllmEngine(folder, config.rollout, SpeculationConfig(enabled=False), config.run.seed)
    tokenizer = load_tokenizer(folder)
    sampling = training_sampling(config.rollout, tokenizer)
    problems = build_sources(config.tasks, "train", config.run.seed)
    count, group = config.trainer.prompts_per_step, config.algorithm.group_size
    rollouts = []
    for number in range(arguments.rollouts):
        batch = [problems.problem(number * count + i // group) for i in range(count * group)]
        responses = engine.generate(one_request_each(batch, tokenizer, sampling, "lengths", number))
        lengths = [len(response.token_ids) for response in responses]
        rollouts.append([lengths[first : first + group] for first in range(0, len(lengths), group)])
    engine.shutdown()
    return {
        "source": f"tools/record_lengths.py: tokens of the samples of each problem, by rollout; {config.run.name}'s "
        "policy before reinforcement learning, temperature and limits of its config",
        "environment": describe_environment(),
        "rollouts": rollouts,
    }


def main() -> None:
    arguments = parser().parse_args()
    found = record(arguments)
    rollouts = found.pop("rollouts")
    assert isinstance(rollouts, list)
    # a line per rollout: readable in a diff
    lines = ",\n".join(json.dumps(rollout, separators=(",", ":")) for rollout in rollouts)
    head = json.dumps(found, indent=1)[:-2]
    arguments.out.write_text(f'{head},\n "rollouts": [\n{lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
