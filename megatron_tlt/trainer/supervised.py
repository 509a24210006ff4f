"""Supervised warm-up of the recipe's base model, or of a new model and tokenizer."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_tlt.actor.megatron_optimizer import chosen_optimizers
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.checkpoint.leftovers import clean_leftovers
from megatron_tlt.checkpoint.manifest import write_manifest
from megatron_tlt.config.optimizer import LrScheduleConfig
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.conversations import ConversationData, read_conversations
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.data.supervised import Example, encode_example, fitting_examples, solution_text
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
    prepare(config.actor.tensor_parallel_size, config.run.deterministic)
    check_versions(libraries_not_needed(config.rollout))
    initialize_distributed(config.launcher.collective_timeout_s)
    if config.model.recipe is None:
        raise ConfigError("model.recipe: not given; a recipe is needed to build a model")
    target = recipe_folder(config)
    if (target / RECIPE_FILE).is_file():
        return
    seed_everything(config.model.recipe.seed)
    chosen_optimizers(config.actor)  # report an invalid optimizer before the warm-up, not after it
    tasks = [task.without_pool for task in config.tasks]  # a budget is one of reinforcement learning
    problems = build_sources(tasks, "train", config.run.seed)
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
                write_start(config, problems, untrained)
            write_manifest(untrained)
        start = Path(broadcast_data(str(untrained), str))
        policy = warm_up(config, problems, load_tokenizer(start), start)
        if broadcast_data((target / RECIPE_FILE).is_file(), bool):
            return  # another run has built it in the meantime
        save_hf_folder(policy, start, target)
        if rank() == 0:
            atomic_write_text(target / RECIPE_FILE, recipe_description(config))
        barrier()


def write_start(config: TltConfig, problems: ProblemMixture, folder: Path) -> None:
    """Writes the untrained model of a recipe with its tokenizer into ``folder``."""
    recipe = config.model.recipe
    assert recipe is not None
    texts = []
    for i in range(recipe.tokenizer.num_problems):
        problem = problems.problem(i)
        texts.append(problem.prompt + solution_text(problem, recipe.supervised.careless_fraction))
    tokenizer = train_tokenizer(texts, recipe.tokenizer.vocab_size, folder, recipe.seed)
    write_untrained(folder, recipe.architecture, recipe, tokenizer.vocab_size, tokenizer.eos_id)


def _examples(config: TltConfig, problems: ProblemMixture, tokenizer: Tokenizer) -> Callable[[int], Example]:
    """Draws the example of an index: a conversation of the data if there is any, else a worked solution."""
    recipe = config.model.recipe
    assert recipe is not None
    supervised = recipe.supervised
    if supervised.data:
        return ConversationData(read_conversations(supervised.data), tokenizer, recipe.seed).example
    return lambda index: encode_example(tokenizer, problems.problem(index), supervised.careless_fraction)


def _batch(examples: Sequence[Example]) -> RolloutBatch:
    prompts = [example.loss_mask.index(1) for example in examples]
    masks = [example.loss_mask[prompt:] for example, prompt in zip(examples, prompts, strict=True)]
    mask_G = torch.tensor([bool(trained) for mask in masks for trained in mask])
    # without a mask nothing is left out, which spares each micro-batch a column
    column = None if mask_G.all() else mask_G
    return RolloutBatch.of_sequences([example.token_ids for example in examples], prompts, loss_mask_G=column)


def _schedule(min_lr_fraction: float) -> LrScheduleConfig:
    if min_lr_fraction == 1.0:
        return LrScheduleConfig()
    return LrScheduleConfig(kind="cosine", min_lr_fraction=min_lr_fraction)


def warm_up(
    config: TltConfig,
    problems: ProblemMixture,
    tokenizer: Tokenizer,
    start: Path,
    on_step: Callable[[dict[str, float]], None] = lambda metrics: None,
) -> Policy:
    """The policy after the recipe's supervised training of the model in ``start``; a collective over the world.

    ``on_step`` is called with the metrics of each step.
    """
    recipe = config.model.recipe
    assert recipe is not None
    supervised = recipe.supervised
    actor = config.actor.model_copy(
        update={
            **warm_up_optimizer(config),
            "lr_warmup_steps": supervised.lr_warmup_steps,
            "max_tokens_per_micro_batch": supervised.max_tokens_per_micro_batch,
            "lora": None,  # a warm-up trains all weights
        }
    )
    policy = Policy(
        start,
        actor,
        recipe.seed,
        total_steps=supervised.num_steps,
        lr_schedule=_schedule(supervised.min_lr_fraction),
        verify=config.model.verify,
    )
    count, left_out = supervised.problems_per_step, 0
    example = _examples(config, problems, tokenizer)
    began = time.perf_counter()
    with Progress(rank(), supervised.num_steps, enabled=config.observe.progress) as progress:
        progress.start("warm-up", supervised.num_steps)
        for step in range(supervised.num_steps):
            drawn = [example(step * count + i) for i in range(count)]
            examples = fitting_examples(drawn, supervised.max_sequence_tokens)
            left_out += count - len(examples)
            metrics = policy.update(_batch(examples), negative_log_likelihood)
            progress.advance()
            on_step(metrics)
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
