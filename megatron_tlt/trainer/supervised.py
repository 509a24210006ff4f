"""Supervised warm-up: trains the recipe's base model, or a new model and tokenizer, on worked solutions."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from megatron_tlt.actor.megatron_optimizer import chosen_optimizer
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.checkpoint.files import clean_leftovers
from megatron_tlt.checkpoint.manifest import write_manifest
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.data.supervised import encode_examples, solution_text
from megatron_tlt.data.tokenizer import Tokenizer, load_tokenizer
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import (
    RECIPE_FILE,
    recipe_description,
    recipe_folder,
    warm_up_optimizer,
    write_untrained,
)
from megatron_tlt.observe.progress import Progress
from megatron_tlt.platform.collectives import broadcast_data
from megatron_tlt.platform.device import (
    barrier,
    initialize_distributed,
    prepare,
    rank,
    seed_everything,
)
from megatron_tlt.platform.files import atomic_write_text, temporary_sibling, write_errors
from megatron_tlt.platform.versions import check_versions
from megatron_tlt.rollout.engines import libraries_not_needed
from megatron_tlt.tasks.mixture import ProblemMixture, build_sources
from megatron_tlt.trainer.export import save_hf_folder


def build_model_of_recipe(config: TltConfig) -> None:
    """Builds and caches the model; a collective. Does nothing if the cache already contains it."""
    prepare(int(config.actor.megatron.get("tensor_model_parallel_size", 1)))
    check_versions(libraries_not_needed(config.rollout))
    initialize_distributed(config.launcher.collective_timeout_s)
    if config.model.recipe is None:
        raise ConfigError("model.recipe: not given; a recipe is needed to build a model")
    target = recipe_folder(config)
    if (target / RECIPE_FILE).is_file():
        return
    seed_everything(config.model.recipe.seed, config.run.deterministic)
    chosen_optimizer(config.actor)  # report an invalid optimizer before the warm-up, not after it
    problems = build_sources(config.tasks, "train", config.run.seed)
    with contextlib.ExitStack() as building:
        untrained = config.model.recipe.base
        if rank() == 0:
            # Files of live processes are kept: another run may be building the same recipe.
            clean_leftovers(target.parent, target.name)
        if rank() == 0 and untrained is None:
            untrained = temporary_sibling(target)
            building.callback(shutil.rmtree, untrained, ignore_errors=True)
            with write_errors(untrained):
                untrained.mkdir(parents=True)
                _write_start(config, problems, untrained)
            write_manifest(untrained)
        start = Path(broadcast_data(str(untrained), str))
        policy = _train(config, problems, load_tokenizer(start), start)
        if broadcast_data((target / RECIPE_FILE).is_file(), bool):
            return  # another run has built it in the meantime
        save_hf_folder(policy, start, target)
        if rank() == 0:
            atomic_write_text(target / RECIPE_FILE, recipe_description(config))
        barrier()


def _write_start(config: TltConfig, problems: ProblemMixture, folder: Path) -> None:
    recipe = config.model.recipe
    assert recipe is not None
    texts = []
    for i in range(recipe.tokenizer.num_problems):
        problem = problems.problem(i)
        texts.append(problem.prompt + solution_text(problem, recipe.supervised.careless_fraction))
    tokenizer = train_tokenizer(texts, recipe.tokenizer.vocab_size, folder, recipe.seed)
    write_untrained(folder, recipe.architecture, recipe, tokenizer.vocab_size, tokenizer.eos_id)


def _train(config: TltConfig, problems: ProblemMixture, tokenizer: Tokenizer, start: Path) -> Policy:
    recipe = config.model.recipe
    assert recipe is not None
    supervised = recipe.supervised
    actor = config.actor.model_copy(
        update={
            **warm_up_optimizer(config),
            "lr_warmup_steps": supervised.lr_warmup_steps,
            "max_tokens_per_micro_batch": supervised.max_tokens_per_micro_batch,
        }
    )
    policy = Policy(
        start,
        actor,
        recipe.seed,
        total_steps=supervised.num_steps,
        lr_decay_style="cosine",
        min_lr_fraction=supervised.min_lr_fraction,
        verify=config.model.verify,
    )
    count, left_out = supervised.problems_per_step, 0
    began = time.perf_counter()
    with Progress(rank(), supervised.num_steps, enabled=config.observe.progress) as progress:
        progress.start("warm-up", supervised.num_steps)
        for step in range(supervised.num_steps):
            batch = [problems.problem(step * count + i) for i in range(count)]
            examples = encode_examples(tokenizer, batch, supervised.max_sequence_tokens, supervised.careless_fraction)
            left_out += len(batch) - len(examples)
            samples = RolloutBatch.of_sequences(
                [e.token_ids for e in examples], [e.loss_mask.index(1) for e in examples]
            )
            metrics = policy.update(samples, negative_log_likelihood)
            progress.advance()
            if (step + 1) % max(1, supervised.num_steps // 20) == 0:
                progress.message(
                    f"warm-up {step + 1}/{supervised.num_steps}  loss {metrics['loss']:.3f}  "
                    f"grad norm {metrics['grad_norm']:.2f}  {time.perf_counter() - began:.0f} s"
                )
        if left_out:
            progress.message(
                f"warm-up skipped {left_out} of {supervised.num_steps * count} examples, which are longer than "
                f"model.recipe.supervised.max_sequence_tokens, {supervised.max_sequence_tokens}"
            )
    return policy
