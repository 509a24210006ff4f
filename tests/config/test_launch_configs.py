"""Every launch config that is shipped: it is valid, its model is the published one, and it fits what it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.cli import main
from megatron_tlt.cli.planned import memory_of
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.source import read_yaml
from megatron_tlt.models.architecture import sizes_of
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.planning.job import job_of
from megatron_tlt.planning.machine import find_machine
from megatron_tlt.planning.memory import MemoryPlan
from tests.helpers.launch import REPOSITORY

LAUNCH = REPOSITORY / "launch"
CONFIGS = sorted(LAUNCH.glob("*.yaml"))
LARGE = [path for path in CONFIGS if re.search(r"-\d+n\d+g$", path.stem)]
# Parameters as the models' cards give them, in billions.
PUBLISHED = {
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-7b": 7.62,
    "qwen2.5-32b": 32.8,
    "llama-3.3-70b": 70.6,
    "qwen3-30b-a3b": 30.5,
    "qwen3-4b": 4.02,
}


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def load(path: Path) -> TltConfig:
    return load_config(path.relative_to(REPOSITORY))


def test_what_is_promised_is_there() -> None:
    found = {path.stem for path in CONFIGS}
    on_cpu = {"calculator-cpu", "quickstart-cpu", "quickstart-deterministic", "smollm2-135m-cpu"}
    on_cpu |= {"less-cpu", "less-smollm2-cpu"}
    assert found == on_cpu | {path.stem for path in LARGE}
    seven, thirty_two = {f"qwen2.5-7b-{n}n8g" for n in (1, 2, 8)}, {f"qwen2.5-32b-{n}n8g" for n in (4, 8)}
    small = {"qwen2.5-0.5b-1n8g", "qwen2.5-1.5b-1n8g"}
    assert found >= seven | thirty_two | small | {"llama-3.3-70b-16n8g", "qwen3-30b-a3b-4n8g", "qwen3-4b-1n8g"}
    architectures = {path.stem for path in (LAUNCH / "architectures").glob("*.json")}
    assert architectures == set(PUBLISHED)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_config_is_valid_and_is_what_its_name_says(path: Path) -> None:
    config = load(path)
    model, nodes, devices = re.fullmatch(r"(.+)-(\d+)n(\d+)g", path.stem).groups()  # type: ignore[union-attr]
    assert (config.launcher.nnodes, config.launcher.nproc_per_node) == (int(nodes), int(devices))
    assert config.run.name == path.stem
    assert config.model.architecture is not None and config.model.architecture.stem == model
    parameters = WeightMap(*sizes_of(config)).num_parameters / 1e9
    assert parameters == pytest.approx(PUBLISHED[model], rel=0.01)
    # what sets this project apart is on: a drafter that is trained while engines wait, and a choice of strategy
    assert config.drafter is not None and config.spot is not None and config.speculation.adaptive is not None
    assert config.drafter.entries_per_step * config.launcher.world_size <= 128
    if "-7b" in path.stem or "-32b" in path.stem or "-70b" in path.stem:
        assert config.rollout.max_response_tokens == 32768


def fits(memory: MemoryPlan) -> bool:
    # a tenth for what the model leaves out; engines that hold a few of the longest do not only wait
    return memory.margin > 0.1 * memory.capacity and memory.cache_tokens > 4 * memory.longest


@pytest.mark.parametrize("layers", ["transformer_engine", "local"])
@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_config_fits_80_gb(path: Path, layers: str) -> None:
    """In every phase, its start and the drafter's training included, with Megatron-Core's own layers too."""
    config = load_config(path.relative_to(REPOSITORY), check_libraries=False)
    config = config.model_copy(update={"actor": config.actor.model_copy(update={"transformer_impl": layers})})
    machine = find_machine("A100-80GB")
    memory = memory_of(config, job_of(config, on_gpu=True), machine)
    phases = {"start, policy", "start, engine", "rollout", "drafter, in the bubble", "log-probs", "update", "reshard"}
    assert {phase.phase for phase in memory.phases} == phases
    assert memory.capacity == 80e9 and memory.problems() == []
    assert fits(memory), memory.margin / 1e9


def test_the_plan_prints_the_margin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", "launch/qwen2.5-7b-1n8g.yaml", "--devices", "A100-80GB", "--json", str(out)]) == 0
    memory = json.loads(out.read_text())["memory"]
    assert f"fits: margin {memory['margin'] / 1e9:.1f} GB of 80.0 GB" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_said_twice() -> None:
    """A value that a config inherits is not repeated in it."""

    def leaves(values: dict, path: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in values.items():
            at = f"{path}{key}"
            found |= leaves(value, at + ".") if isinstance(value, dict) and value else {at: value}
        return found

    def inherited(path: Path) -> dict[str, object]:
        own = read_yaml(path)
        below: dict[str, object] = {}
        for parent in own.pop("defaults", []):
            below |= inherited(path.parent / parent)
        repeated = {key for key, value in leaves(own).items() if key in below and below[key] == value}
        assert not repeated, f"{path.name}: {repeated}"
        return below | leaves(own)

    for path in LARGE:
        inherited(path)


@pytest.mark.parametrize("path", [*LARGE, *sorted((LAUNCH / "shared").glob("*.yaml"))], ids=lambda path: path.stem)
def test_each_says_what_to_tune(path: Path) -> None:
    assert path.read_text().startswith("# ") and path.read_text().count("# ") >= 3


def documented_commands() -> list[list[str]]:
    """Config and overrides of every `tlt train` in the documentation that names a launch config."""
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    commands = (found for page in pages for found in re.findall(r"tlt train (launch/[^`#\n]*)", page.read_text()))
    return [command.split() for command in commands]


@pytest.mark.parametrize("command", documented_commands(), ids=" ".join)
def test_what_the_documentation_says_to_type_is_accepted(command: list[str], tmp_path: Path) -> None:
    path, *overrides = command
    if "smollm2" in path:  # its model is fetched by a tool: another stands for it
        overrides.append(f"model.recipe.base={write_tiny_model('llama', tmp_path, max_position_embeddings=512)}")
    load_config(path, overrides)
