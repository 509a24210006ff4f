"""Runs of the real loop on a model of some thousand parameters."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_tlt.observe.metric_table import find_metric
from megatron_tlt.observe.metrics import read_metrics
from tests.helpers.launch import MARK, REPOSITORY, kill_marked, python, run_logged

CONFIG = """
run: {name: tiny, seed: 3, deterministic: true}
launcher: {nproc_per_node: 2, preload: false}
model:
  recipe:
    cache_dir: %(cache)s
    architecture: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2,
      num_key_value_heads: 1, max_position_embeddings: 128}
    tokenizer: {vocab_size: 104, num_problems: 200}
    supervised: {num_steps: 30, problems_per_step: 16, max_sequence_tokens: 96, optimizer: {lr: 5.0e-3}}
tasks:
  - {name: chain_sum, params: {sizes: {min: 2, max: 3}}}
  - {name: gcd, params: {sizes: {min: 9, max: 19}}}
actor:
  transformer_impl: local
  max_tokens_per_micro_batch: 1024
  optimizer: {lr: 1.0e-3}
  megatron: {hidden_dropout: 0.1}   # a run resumed without its random states would go another way
rollout:
  max_prompt_tokens: 48
  max_response_tokens: 32
  vllm: {dtype: float32, max_num_seqs: 32, num_gpu_blocks_override: 64}
algorithm: {group_size: 4, entropy_coefficient: 0.1}   # a gradient even where all rewards are the same
evaluation: {problems: 8, samples: 2, greedy: false}
trainer: {steps: 4, prompts_per_step: 4, save_every: 1}
observe: {tensorboard: false}
"""


@dataclass
class Runs:
    """Starts ``tlt`` on one config with runs below one folder.

    All of it is real, torchrun too. Unless ``fresh``, each process is a fork of one that has done the imports. The
    config does without those of ``launcher.preload``, so that a rank's environment shows which one it is.
    """

    folder: Path
    started: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        return self.folder / "tiny.yaml"

    def command(self, name: str, *overrides: str, fresh: bool = False, command: str = "train") -> list[str]:
        entry = "import sys; from megatron_tlt.cli import main; sys.exit(main())"
        run_dir = f"run.dir={self.folder / name}"
        return [python(fresh), "-c", entry, command, str(self.config), run_dir, *overrides]

    def train(self, name: str, *overrides: str, expect_status: int | None = 0, fresh: bool = False) -> str:
        log = run_logged(self.command(name, *overrides, fresh=fresh), timeout_s=900, expect_status=expect_status)
        file = self.folder / name / "metrics.jsonl"
        metrics = {key for row in (read_metrics(file) if file.is_file() else ()) for key in row}
        assert {key for key in metrics if find_metric(key) is None} == set(), "observe/metric_table.py explains metrics"
        return log

    def evaluate(self, name: str, *overrides: str) -> str:
        return run_logged(self.command(name, *overrides, command="eval"), timeout_s=600)

    def start(
        self, name: str, *overrides: str, fresh: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """To be killed it need not be ``fresh``; other signals go down a tree of processes, which forks do not form."""
        self.started[name] = uuid.uuid4().hex
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), MARK: self.started[name], **(env or {})}
        log = (self.folder / f"{name}.log").open("ab")
        return subprocess.Popen(
            self.command(name, *overrides, fresh=fresh),
            env=environment,
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self, name: str) -> None:
        """SIGKILL to every process of the run at once."""
        kill_marked(self.started[name])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-8000:]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(CONFIG % {"cache": folder / "models"})
    return Runs(folder)


@pytest.fixture(scope="session")
def uninterrupted(runs: Runs) -> Path:
    """A run from start to end, every process of it from nothing."""
    runs.train("uninterrupted", fresh=True)
    return runs.folder / "uninterrupted"


FAULT_STEPS = 12
# two of four problems are the first rank's, and each takes its engine many rounds: the two others wait, and on a quick
# machine too for longer than it takes them to hear of it
GREEDY = (
    "launcher.nproc_per_node=3",
    "run.deterministic=false",
    f"trainer.steps={FAULT_STEPS}",
    "trainer.prompts_per_step=4",
    "trainer.async_save=false",
    "algorithm.group_size=24",
    "rollout.vllm.max_num_seqs=3",
    "rollout.sampling.temperature=0",
)
# spot.checkpoint_every and min_steps: of the session's checkpoints there is one as soon as it did what it must
GREEDY_SPOT = (
    *GREEDY,
    "drafter.kind=eagle",
    "speculation.drafter=eagle",
    "speculation.num_speculative_tokens=1",  # more would shorten the wait
    "drafter.entries_per_step=2",
    "spot.min_replicas=2",
    "spot.min_entries=1",
    "spot.checkpoint_every=2",
    "spot.min_steps=2",
    "spot.heartbeat_s=0.2",
    "spot.silent_after_s=1.5",
    "spot.lost_after_s=3",
)


@pytest.fixture(scope="session")
def undisturbed(runs: Runs) -> Path:
    """Greedy, without drafter, spot trainer or fault: a drafter decides on speed alone, so its policy is the one."""
    runs.train("undisturbed", *GREEDY, "speculation.enabled=false")
    return runs.folder / "undisturbed"


def rows_of(run: Path) -> list[dict[str, float | None]]:
    """The metrics of a run's steps."""
    return [row for row in read_metrics(run / "metrics.jsonl") if row["step"]]


def assert_same_policy(run: Path, reference: Path) -> None:
    """Every step once, of the same loss, engines that held the actor's weights, and at the end the same bits."""
    ours, theirs = rows_of(run), rows_of(reference)
    assert [row["step"] for row in ours] == list(range(1, FAULT_STEPS + 1))
    for name in ("actor/loss", "actor/grad_norm", "reward/mean", "length/mean"):
        assert [row[name] for row in ours] == [row[name] for row in theirs], name
    assert all((row["actor/grad_norm"] or 0) > 1e-3 for row in ours), "equal bits would show nothing"
    assert all(row["reshard/verified_tensors"] == row["reshard/tensors"] for row in ours)
    weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (run, reference)]
    assert weights[0] == weights[1]
