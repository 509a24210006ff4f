"""The pass-through dictionaries against the installed libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tlt.cli import main
from megatron_tlt.config.libraries import library_fields
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.passthrough import TARGETS
from tests.config.test_loader import violations, write


def test_unknown_owned_and_mistyped_keys_are_named(tmp_path: Path) -> None:
    text = "\n".join(
        violations(
            write(tmp_path),
            "rollout.vllm.gpu_memory_utilisation=0.5",
            "rollout.vllm.seed=3",
            "rollout.vllm.max_num_seqs=many",
            "rollout.vllm.dtype=float31",
            "actor.megatron.num_layers=2",
            "actor.megatron.recompute_granularity=ful",
            "actor.ddp.overlap_grad_reduce=1",
            "actor.optimizer.weight_decai=0.1",
            "model.recipe.supervised.optimizer.lr=high",
            libraries=True,
        )
    )
    assert "gpu_memory_utilisation: unknown to the installed EngineArgs; did you mean gpu_memory_utilization" in text
    assert "rollout.vllm.seed: cannot be set here; managed by run.seed" in text
    assert "rollout.vllm.max_num_seqs: found 'many'; allowed: a whole number, null" in text
    assert "rollout.vllm.dtype: found 'float31'" in text and "'bfloat16'" in text
    assert "actor.megatron.num_layers: cannot be set here" in text
    assert "recompute_granularity: found 'ful'; allowed: 'full', 'selective', null" in text
    assert "actor.ddp.overlap_grad_reduce: found 1; allowed: true or false" in text
    assert "did you mean weight_decay" in text
    assert "model.recipe.supervised.optimizer.lr: found 'high'; allowed: a number, null" in text
    assert len(text.splitlines()) == 9


def test_right_keys_pass(tmp_path: Path) -> None:
    overrides = [
        "rollout.vllm={dtype: float32, max_num_seqs: 64, gpu_memory_utilization: 0.5, enforce_eager: true}",
        "launcher.nproc_per_node=2",
        "actor.megatron={sequence_parallel: true, recompute_granularity: full, recompute_method: uniform}",
        "actor.megatron.tensor_model_parallel_size=2",
        "actor.optimizer={lr: 1e-5, clip_grad: 1, weight_decay: 0.0}",
        "actor.ddp={overlap_grad_reduce: true}",
    ]
    assert load_config(write(tmp_path), overrides).rollout.vllm["max_num_seqs"] == 64


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.path)
def test_owned_keys_exist_in_the_installed_library(target) -> None:  # type: ignore[no-untyped-def]
    fields = library_fields(target.module, target.class_name)
    assert fields and set(target.owned) <= set(fields)


def test_fields_read_from_source_are_those_of_the_imported_class() -> None:
    """The reader never imports the library; here one class is imported to hold it against the truth."""
    script = (
        "from megatron.core.transformer.transformer_config import TransformerConfig as T\n"
        "print(*sorted(n for n in T.__dataclass_fields__ if not n.startswith('_')))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    found = library_fields("megatron.core.transformer.transformer_config", "TransformerConfig")
    assert sorted(found) == done.stdout.split()


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom megatron_tlt.config.loader import load_config\n"
        "load_config(sys.argv[1], ['rollout.vllm.dtype=float32', 'actor.optimizer.lr=1'])\n"
        "print([m for m in ('torch', 'vllm', 'megatron', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(write(tmp_path))], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_library_that_is_not_installed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_tlt.config.passthrough.library_fields", lambda *_: {})
    config = write(tmp_path)
    assert main(["config", str(config), "rollout.vllm.dtype=float32"]) == 0
    assert "note: rollout.vllm: not checked, because vllm is not installed" in capsys.readouterr().err
    assert main(["train", str(config), "rollout.vllm.dtype=float32"]) == 2
    assert "rollout.vllm: cannot be checked, because vllm is not installed" in capsys.readouterr().err
