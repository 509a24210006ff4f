"""Config files, inheritance, overrides, and what a wrong one is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from megatron_tlt.actor.batches import BatchShape, plan_shares
from megatron_tlt.config.loader import (
    RESOLVED,
    compare_resolved,
    dump_resolved,
    load_config,
    load_resolved,
    read_resolved,
)
from megatron_tlt.config.migrations import VERSION_KEY, migrate
from megatron_tlt.config.schema import LauncherConfig, TltConfig
from megatron_tlt.errors import ConfigError

BASE = {
    "model": {"recipe": {}},
    "tasks": [{"name": "chain_sum"}, {"name": "gcd"}],
    "rollout": {"max_prompt_tokens": 128, "max_response_tokens": 512},
}


def write(folder: Path, name: str = "base.yaml", **sections: object) -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump({**BASE, **sections}))
    return path


def violations(path: Path, *overrides: str, libraries: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, check_libraries=libraries)
    assert caught.value.exit_status == 2
    return str(caught.value).splitlines()


def test_every_violation_is_reported_at_once_with_path_found_and_allowed(tmp_path: Path) -> None:
    wrong = (
        "trainer.stps=3",
        "trainer.steps=0",
        "rollout.sampling.top_p=2",
        "speculation.drafter=magic",
        "speculation.ngram.prompt_lookup_max=65",
        "speculation.suffix={epoch_decay: 0.5, window: 13}",
        "run.seed=abc",
    )
    lines = violations(write(tmp_path), *wrong)
    assert len(lines) == len(wrong)
    assert all(line.startswith(f"{tmp_path / 'base.yaml'}: ") for line in lines)
    text = "\n".join(lines)
    assert "trainer.stps: unknown key; did you mean steps" in text
    assert "trainer.steps: found 0; allowed: above 0" in text
    assert "rollout.sampling.top_p: found 2; allowed: at most 1" in text
    assert "speculation.drafter: found 'magic'; allowed: 'ngram'" in text
    assert "speculation.ngram.prompt_lookup_max: found 65; allowed: at most 64" in text
    assert "epoch_decay is 0.5 and window 13; allowed: a decay with which" in text
    assert "run.seed: found 'abc'; allowed: a whole number" in text


def test_rules_between_keys_are_reported_together(tmp_path: Path) -> None:
    lines = violations(
        write(tmp_path),
        "launcher.nproc_per_node=2",
        "actor.megatron.tensor_model_parallel_size=3",
        "rollout.tensor_parallel_size=3",
        "rollout.max_response_tokens=5000",
        "model.recipe.architecture.hidden_size=64",
        "speculation.ngram.prompt_lookup_min=9",
    )
    text = "\n".join(lines)
    assert "does not divide the 2 processes" in text
    assert "rollout.tensor_parallel_size: found 3; allowed: a divisor of the 2 processes: 1, 2" in text
    assert "max_prompt_tokens + max_response_tokens = 5128; allowed: at most max_position_embeddings = 1024" in text
    assert "hidden_size / num_attention_heads = 16; allowed: at least 32" in text
    assert "speculation.ngram.prompt_lookup_min: found 9" in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.mini_batches=7"], "trainer.mini_batches: found 7; allowed: a divisor of"),
        (
            ["rollout.sampling.temperature=0.005"],
            "rollout.sampling.temperature: found 0.005; allowed: at least 0.01, or 0 (vLLM",
        ),
        (["evaluation.temperature=0.005"], "evaluation.temperature: found 0.005; allowed: at least 0.01 (vLLM"),
        (
            ["actor.megatron.moe_router_load_balancing_type=global_aux_loss"],
            "moe_router_load_balancing_type: found 'global_aux_loss'; a global loss needs micro-batches of equal size",
        ),
        (
            ["actor.megatron.moe_router_load_balancing_type=[aux_loss, seq_aux_loss]"],
            "moe_router_load_balancing_type: found ['aux_loss', 'seq_aux_loss'] with actor.packing true",
        ),
        (
            ["speculation.path=/x"],
            "speculation.path: found /x, but drafter ngram has no model; allowed: with eagle, eagle3",
        ),
        (
            ["speculation.draft_sample_method=probabilistic"],
            "speculation.draft_sample_method: found probabilistic, but drafter ngram has no distribution to draw from",
        ),
        (["speculation.drafter=eagle"], "speculation.path: not given; drafter eagle needs the folder of its head"),
        (
            ["speculation.drafter=eagle3", "speculation.path=/x"],
            "speculation.path: no config.json in /x; allowed: the folder of an EAGLE head",
        ),
        (["launcher.nproc_per_node=4", "trainer.prompts_per_step=2"], "at least one for each of the 4 engines"),
        (["launcher.nproc_per_node=3", "actor.megatron.tensor_model_parallel_size=3"], "the model's 4 attention heads"),
        (
            ["launcher.nproc_per_node=3", "actor.megatron.pipeline_model_parallel_size=3"],
            "a divisor of the model's 4 layers: 1, 2, 4",
        ),
        (
            [
                "launcher.nproc_per_node=2",
                "actor.megatron.tensor_model_parallel_size=2",
                "model.recipe.architecture.intermediate_size=131",
            ],
            "a divisor of the model's intermediate_size, 131",
        ),
        (
            ["actor.max_tokens_per_micro_batch=639"],
            "actor.max_tokens_per_micro_batch: found 639; allowed: at least rollout.max_prompt_tokens + "
            "rollout.max_response_tokens = 640",
        ),
        (
            ["model.recipe.supervised.max_tokens_per_micro_batch=511"],
            "supervised.max_tokens_per_micro_batch: found 511; allowed: at least max_sequence_tokens = 512",
        ),
        (["actor.megatron.fp16=true"], "actor.megatron.fp16: found True; the actor computes in bf16"),
        (["actor.optimizer.fp16=true"], "actor.optimizer.fp16: found True; the actor computes in bf16"),
        (
            ["model.recipe.supervised.optimizer.fp16=true"],
            "model.recipe.supervised.optimizer.fp16: found True; the actor computes in bf16",
        ),
    ],
)
def test_batches_heads_layers_and_widths(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert expected in "\n".join(violations(write(tmp_path), *overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["actor.optimizer.optimizer=muon"],
            "actor.optimizer.optimizer: found 'muon'; allowed: adam, sgd, or a class's",
        ),
        (["actor.optimizer.optimizer=nothere.Adam"], "found 'nothere.Adam'; no package 'nothere' is installed"),
        (["actor.optimizer_arguments.betas=[0.9, 0.95]"], "betas: actor.optimizer.optimizer is 'adam'"),
        (
            ["actor.optimizer.optimizer=torch.optim.RAdam", "actor.optimizer_arguments={lr: 1e-3}"],
            "actor.optimizer_arguments.lr: cannot be set here; managed by actor.optimizer.lr",
        ),
        (
            ["actor.optimizer.optimizer=torch.optim.RAdam", "actor.optimizer_arguments={weight_decay: 0.1}"],
            "actor.optimizer_arguments.weight_decay: cannot be set here; managed by actor.optimizer.weight_decay",
        ),
        (
            ["actor.optimizer={optimizer: sgd, adam_beta1: 0.8}"],
            "actor.optimizer.adam_beta1: has no effect on 'sgd'; allowed: with optimizer: adam",
        ),
        (["actor.optimizer={sgd_momentum: 0.8}"], "actor.optimizer.sgd_momentum: has no effect on 'adam'"),
        (
            ["actor.optimizer={optimizer: sgd, use_precision_aware_optimizer: true}"],
            "actor.optimizer.use_precision_aware_optimizer: found true; optimizer 'sgd' does not support it",
        ),
        (
            ["actor.ddp.use_distributed_optimizer=false"],
            "actor.ddp.use_distributed_optimizer: found false; checkpoints hold its shards; allowed: true",
        ),
        (
            ["model.recipe.supervised.optimizer.optimizer=torch.optim.RAdam"],
            "model.recipe.supervised.optimizer.optimizer: found 'torch.optim.RAdam'; allowed: adam, sgd, or absent",
        ),
    ],
)
def test_optimizers(tmp_path: Path, overrides: list[str], expected: str) -> None:
    (line,) = violations(write(tmp_path), *overrides)
    assert expected in line


def test_an_optimizer_by_import_path_passes_with_its_arguments(tmp_path: Path) -> None:
    overrides = [
        "actor.optimizer={optimizer: torch.optim.RAdam, lr: 1e-5}",
        "actor.optimizer_arguments={betas: [0.9, 0.95]}",
        "model.recipe.supervised.optimizer={optimizer: adam, adam_beta2: 0.98}",
    ]
    assert load_config(write(tmp_path), overrides).actor.optimizer_arguments == {"betas": [0.9, 0.95]}


def test_model_folder_must_exist_and_hold_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    path = write(tmp_path, model={"path": str(folder)})
    assert f"model.path: no folder {folder}" in violations(path)[0]
    folder.mkdir()
    assert f"model.path: no config.json in {folder}" in violations(path)[0]
    (folder / "config.json").write_text('{"hidden_size": 12')
    assert "cannot be read" in violations(path)[0]
    (folder / "config.json").write_text('{"max_position_embeddings": 200}')
    assert "at most max_position_embeddings = 200" in violations(path)[0]


def test_inheritance_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path, trainer={"steps": 5, "mini_batches": 2})
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.yaml"
    child.write_text("defaults: [../base.yaml]\ntrainer: {steps: 9}\ntasks: [{name: number_sorting}]\n")
    config = load_config(child, check_libraries=False)
    assert (config.trainer.steps, config.trainer.mini_batches) == (9, 2)
    assert [task.name for task in config.tasks] == ["number_sorting"]


def test_circular_inheritance_names_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b.yaml]")
    (tmp_path / "b.yaml").write_text("defaults: [a.yaml]")
    assert "a.yaml -> b.yaml -> a.yaml" in violations(tmp_path / "a.yaml")[0]


def test_duplicate_key_and_bad_yaml_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("trainer:\n  steps: 1\n  save_every: 2\n  steps: 3\n")
    assert violations(path) == [f"{path}:4: not valid YAML: key 'steps' is given twice, on lines 2 and 4"]
    path.write_text("trainer: [1,\n")
    assert violations(path)[0].startswith(f"{path}:2: not valid YAML")


def test_missing_file_names_it(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in violations(tmp_path / "none.yaml")[0]


def test_overrides_parse_yaml_and_take_list_indices(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path),
        ["tasks.1.weight=2", "speculation.enabled=false", "actor.optimizer.lr=1e-3", "observe.wandb={project: x}"],
        check_libraries=False,
    )
    assert config.tasks[1].weight == 2.0
    assert config.speculation.enabled is False
    assert config.actor.optimizer["lr"] == 0.001
    assert config.observe.wandb is not None and config.observe.wandb.project == "x"


def test_the_bounds_are_those_that_batches_have(tmp_path: Path) -> None:
    """A sequence of prompt and response that the config allows fits a micro-batch; one token less would not do."""
    config = load_config(write(tmp_path), ["actor.max_tokens_per_micro_batch=640"], check_libraries=False)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    for packed in (True, False):
        shape = BatchShape(config.actor.max_tokens_per_micro_batch, packed=packed)
        assert plan_shares([longest, 1], shape, 1)
        with pytest.raises(ConfigError, match="max_tokens_per_micro_batch 640"):
            plan_shares([longest + 1], shape, 1)


def test_malformed_overrides_are_reported_at_once(tmp_path: Path) -> None:
    lines = violations(
        write(tmp_path), "trainer.steps", "tasks.7.weight=1", "run.seed.x=1", "run.name=ok", "tasks.0.name.a=1"
    )
    assert "the form is key.path=value" in lines[0]
    assert "tasks is a list; allowed: an index from 0 to 1" in lines[1]
    assert "tasks.0.name is the value 'chain_sum'" in lines[-1]


def test_resolved_config_comes_back_equal(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["actor.optimizer.lr=1e-5", "observe.wandb.project=p"], check_libraries=False)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(config))
    assert load_resolved(resolved) == config


def resolved_file(
    folder: Path, change: Callable[[dict[str, Any]], object] = lambda values: None
) -> tuple[Path, TltConfig]:
    """A resolved config, changed, and the config that it came from."""
    config = load_config(write(folder), check_libraries=False)
    values = yaml.safe_load(dump_resolved(config))
    change(values)
    path = folder / "resolved.yaml"
    path.write_text(yaml.safe_dump(values))
    return path, config


def test_a_resumed_run_may_change_only_what_does_not_identify_it(tmp_path: Path) -> None:
    path, config = resolved_file(tmp_path)
    assert compare_resolved(path, config) == []
    other = ["trainer.steps=9", "evaluation.problems=3", "observe.progress=false", "rollout.max_prompt_tokens=200"]
    assert compare_resolved(path, load_config(write(tmp_path), other, check_libraries=False)) == []
    other = ["trainer.mini_batches=2", "tasks.0.weight=3"]
    assert compare_resolved(path, load_config(write(tmp_path), other, check_libraries=False)) == [
        "tasks.0.weight: 1.0 -> 3.0",
        "trainer.mini_batches: 1 -> 2",
    ]


def test_a_key_that_an_earlier_release_did_not_know_had_its_default(tmp_path: Path) -> None:
    path, config = resolved_file(tmp_path, lambda values: values["rewards"].pop("timeout_s"))
    assert compare_resolved(path, config) == []
    path, config = resolved_file(tmp_path, lambda values: (values.pop("reshard"), values["algorithm"].pop("clip_low")))
    assert compare_resolved(path, config) == []
    changed = load_config(write(tmp_path), ["algorithm.clip_low=0.3"], check_libraries=False)
    assert compare_resolved(path, changed) == ["algorithm.clip_low: 0.2 -> 0.3"]
    assert load_resolved(path) == config


def test_a_default_that_came_to_follow_from_the_run_does_not_break_older_ones(tmp_path: Path) -> None:
    overrides = ["launcher.nproc_per_node=2", "speculation.drafter=eagle", "drafter.kind=eagle", "spot={}"]
    config = load_config(write(tmp_path), overrides, check_libraries=False)
    values = yaml.safe_load(dump_resolved(config))
    values["spot"] |= {"min_replicas": 2, "min_entries": 64}
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(values))
    assert compare_resolved(path, config) == []


def test_a_resolved_config_that_is_cut_off_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path, text = tmp_path / RESOLVED, dump_resolved(load_config(write(tmp_path), check_libraries=False))
    lines = text.splitlines(keepends=True)
    # also where all keys without a default are left
    for count in {1, *range(2, len(lines), 7), len(lines) - 1}:
        path.write_text("".join(lines[:count]), encoding="utf-8")
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            read_resolved(path)
    path.write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(ConfigError, match="is cut off"):
        read_resolved(path)
    path.write_text(text.rstrip(), encoding="utf-8")  # an editor's
    assert read_resolved(path)


def test_a_resolved_config_of_a_newer_release_is_refused_by_its_version(tmp_path: Path) -> None:
    path, config = resolved_file(tmp_path, lambda values: values.update({VERSION_KEY: 1000}))
    for read in (load_resolved, lambda path: compare_resolved(path, config)):
        with pytest.raises(ConfigError, match=rf"{path}: config_version is 1000; this release reads 0 to "):
            read(path)


def test_a_renamed_key_is_migrated_from_any_earlier_version() -> None:
    def first(values: dict[str, Any]) -> None:
        values["b"] = values.pop("a")

    def second(values: dict[str, Any]) -> None:
        values["c"] = values.pop("b") + 1

    assert migrate({"a": 1}, "f", [first, second]) == {"c": 2}
    assert migrate({VERSION_KEY: 1, "b": 1}, "f", [first, second]) == {"c": 2}
    assert migrate({VERSION_KEY: 2, "c": 1}, "f", [first, second]) == {"c": 1}


def test_a_resolved_config_serves_as_a_launch_config(tmp_path: Path) -> None:
    path, config = resolved_file(tmp_path)
    assert load_config(path, check_libraries=False) == config


def test_off_needs_no_quotes_among_strategies() -> None:
    quickstart = Path(__file__).parents[2] / "launch" / "quickstart-cpu.yaml"
    found = load_config(quickstart, ["speculation.adaptive.strategies=[off, suffix-3-p50, suffix+eagle3-3]"])
    assert found.speculation.adaptive is not None
    assert found.speculation.adaptive.strategies == ["off", "suffix-3-p50", "suffix+eagle3-3"]
    with pytest.raises(ConfigError, match=r"strategies.0: found 'ngram-3-p50'"):
        load_config(quickstart, ["speculation.adaptive.strategies=[ngram-3-p50]"])


def test_a_drafter_that_no_engine_loads_needs_no_folder() -> None:
    quickstart = Path(__file__).parents[2] / "launch" / "quickstart-cpu.yaml"
    with pytest.raises(ConfigError, match=r"speculation.enabled: found false, but a drafter is trained; allowed: true"):
        load_config(quickstart, ["speculation.enabled=false"])
    config = load_config(quickstart, ["speculation.enabled=false", "spot=null", "drafter=null"])
    assert config.speculation.drafter == "eagle3" and config.speculation.path is None


def test_auto_is_a_process_for_each_visible_gpu_and_two_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        def __init__(self, _: str) -> None: ...

        def glob(self, _: str) -> list[int]:
            return list(range(gpus))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("megatron_tlt.config.schema.Path", Found)
    counts = []
    for gpus, visible in ((0, None), (1, None), (8, None), (8, "0,1,2"), (8, ""), (8, "0,-1,2"), (8, "-1")):  # noqa: B007
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        counts.append(LauncherConfig.model_validate({"nproc_per_node": "auto"}).nproc_per_node)
    assert counts == [2, 1, 8, 3, 2, 1, 2]
    with pytest.raises(ValidationError):
        LauncherConfig.model_validate({"nproc_per_node": "all"})
