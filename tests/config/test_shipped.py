"""Shipped configs by name, and the paths in a config, from any working folder."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from megatron_tlt.cli import main
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.shipped import INPUT_PATHS, LAUNCH, shipped
from megatron_tlt.errors import ConfigError
from tests.config.test_loader import write

WRITTEN = {"run.dir", "model.recipe.cache_dir", "elastic.memory_dir"}


def path_keys(section: type[BaseModel], prefix: str = "") -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        inside = [field.annotation]
        while inside:
            annotation = inside.pop()
            inside += typing.get_args(annotation)
            if annotation is Path:
                found.add(prefix + name)
            elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
                found |= path_keys(annotation, f"{prefix}{name}.")
    return found


def test_every_path_is_known_as_read_or_written() -> None:
    assert path_keys(TltConfig) == {*INPUT_PATHS, *WRITTEN}


@pytest.mark.parametrize(
    "name", [*sorted(shipped().keys() - {"smollm2-135m-cpu", "less-smollm2-cpu"}), "qwen2.5-7b-1n8g.yaml"]
)
def test_a_shipped_config_is_found_by_name_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(name)
    assert config.model.architecture is None or config.model.architecture.is_relative_to(LAUNCH)
    assert config.run.dir == Path("runs", config.run.name)  # outputs are where the user is
    monkeypatch.chdir(LAUNCH.parent)
    there = load_config(f"launch/{name.removesuffix('.yaml')}.yaml")
    assert there.model.architecture is None or there.model.architecture.parts[:2] == ("launch", "architectures")


def test_a_name_that_is_not_shipped_is_refused_with_similar_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such file; of the shipped ones, did you mean qwen2\.5-7b-1n8g"):
        load_config("qwen2.5-7b-1n9g")
    with pytest.raises(ConfigError, match=r"no such file; did you mean the shipped qwen2\.5-7b-1n8g\?"):
        load_config("launch/qwen2.5-7b-1n8g.yaml")
    Path("qwen2.5-7b-1n8g").mkdir()
    assert load_config("qwen2.5-7b-1n8g").launcher.nproc_per_node == 8
    own = write(tmp_path).rename("quickstart-cpu")
    assert load_config(own, ["rollout.max_response_tokens=77"]).rollout.max_response_tokens == 77


def test_paths_are_looked_up_beside_the_config_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's file lies beside the parent; one that lies in the working folder only is found there."""
    for file in ("exp/shared/data/train.jsonl", "work/held.jsonl", "work/data/train.jsonl"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    task = {"kind": "file", "name": "own", "path": "data/train.jsonl", "held_out_path": "held.jsonl"}
    parent = {"model": {"path": "none", "architecture": "architectures/qwen2.5-7b.json"}, "tasks": [task]}
    (tmp_path / "exp/shared/parent.yaml").write_text(yaml.safe_dump(parent))
    (tmp_path / "exp/own.yaml").write_text("defaults: [shared/gpu-80gb.yaml, shared/parent.yaml]\n")
    monkeypatch.chdir(tmp_path / "work")
    config = load_config("../exp/own.yaml", check_libraries=False)
    assert config.tasks[0].path == tmp_path / "exp/shared/data/train.jsonl"
    assert config.tasks[0].held_out_path == Path("held.jsonl")
    assert config.model.path == Path("none") and config.model.architecture is not None
    assert config.model.architecture.is_file() and config.algorithm.group_size == 16  # the shipped parent
    monkeypatch.chdir(tmp_path)
    assert load_config("exp/own.yaml", check_libraries=False).tasks[0].path == Path("exp/shared/data/train.jsonl")


def test_a_written_layout_inherits_the_shipped_config_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "qwen2.5-0.5b-1n8g", "--search", "--write", "mine.yaml"]) == 0
    assert yaml.safe_load(Path("mine.yaml").read_text())["defaults"] == ["qwen2.5-0.5b-1n8g.yaml"]
    assert load_config("mine.yaml", check_libraries=False).run.name == "mine"
