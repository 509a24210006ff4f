"""The registry of drafter kinds: properties derived from it, and a user's kind by import path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.drafter_kinds import KINDS, MODEL_FREE, DrafterKind, kind_of, model_drafters
from megatron_tlt.config.loader import dump_resolved, load_config, load_resolved
from megatron_tlt.config.speculation import AdaptiveConfig, SpeculationConfig
from megatron_tlt.drafter import drafter_from_target, load_without_target, save_drafter
from megatron_tlt.drafter.eagle3 import NUM_AUX_LAYERS
from megatron_tlt.drafter.folder import aux_layers_of, load_drafter, model_class
from megatron_tlt.drafter.model import SharedWeights
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf_folder import read_hf_config
from megatron_tlt.observe.drafter_check import DrafterCheck
from megatron_tlt.speculation.strategy import DRAFTERS, Strategy, drafters
from tests.helpers.launch import REPOSITORY
from tests.helpers.user_code import add_module

MODULE = "tlt_user_heads"
KIND = f"{MODULE}.KIND"
SOURCE = f"""
from megatron_tlt.config.drafter_kinds import DrafterKind
from megatron_tlt.drafter.eagle3 import Eagle3


class Head(Eagle3):
    kind = "{KIND}"


class Unnamed(Eagle3):
    pass


FORM = dict(title="mine", method="eagle3", architecture="LlamaForCausalLMEagle3", num_aux_layers=3, own_head=True)
KIND = DrafterKind(model="{MODULE}.Head", lr=7e-4, unroll_steps=2, **FORM)
UNNAMED = DrafterKind(model="{MODULE}.Unnamed", **FORM)
ABSENT = DrafterKind(model="{MODULE}.Absent", **FORM)
OTHER = object()
"""


@pytest.fixture
def user_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_module(tmp_path / "code", MODULE, SOURCE, monkeypatch)


def test_built_in_kinds_are_unchanged() -> None:
    assert DRAFTERS == ("off", "ngram", "suffix", "eagle", "eagle3", "suffix+eagle", "suffix+eagle3")
    eagle, eagle3 = DrafterConfig(kind="eagle"), DrafterConfig(kind="eagle3")
    assert (eagle.lr, eagle.steps, eagle.regression_weight) == (1e-4, 3, 0.5)
    assert (eagle3.lr, eagle3.steps, eagle3.regression_weight) == (3e-4, 3, 0.0)
    assert KINDS["eagle3"].num_aux_layers == NUM_AUX_LAYERS and KINDS["eagle"].num_aux_layers == 0
    assert {name: kind.method for name, kind in KINDS.items()} == {"eagle": "eagle", "eagle3": "eagle3"}


@pytest.mark.parametrize("name", KINDS)
def test_a_kinds_data_matches_its_model(name: str, target_folder: Path) -> None:
    kind, model = KINDS[name], drafter_from_target(target_folder, name, seed=1)
    assert type(model) is model_class(name) and model.kind == name
    hidden = int(model.config.hidden_size)
    assert model.entry_size == kind.states_per_token * hidden
    assert len(aux_layers_of(model.config)) == kind.num_aux_layers
    assert ("lm_head.weight" in model.state_dict()) == hasattr(model.config, "draft_vocab_size") == kind.own_head
    assert model.config.architectures == [kind.architecture]


def test_naming_kinds_imports_no_torch() -> None:
    code = "import sys, megatron_tlt.config.schema, megatron_tlt.speculation.strategy; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.strip() == "False"


def test_a_kind_by_import_path_has_its_defaults_and_strategies(user_kind: None) -> None:
    config = DrafterConfig(kind=KIND)
    assert (config.lr, config.steps, config.regression_weight) == (7e-4, 2, 0.0)
    assert config.entry_bytes(6, 32) == DrafterConfig(kind="eagle3").entry_bytes(6, 32)
    assert model_drafters()[: len(KINDS)] == tuple(KINDS) and KIND in model_drafters()
    names = ["off", f"{KIND}-3", f"suffix+{KIND}-5-by-length-p50"]
    section = SpeculationConfig(drafter=KIND, adaptive=AdaptiveConfig(strategies=names))
    assert section.adaptive is not None
    strategies = [Strategy.parse(name) for name in section.adaptive.strategies]
    assert [strategy.name for strategy in strategies] == names
    assert strategies[2].drafters == ("suffix", KIND) and strategies[2].uses(model_drafters())
    assert set(drafters()) >= {KIND, f"suffix+{KIND}"}
    check = DrafterCheck(steps=1)
    row = {"speculation/gate_open": 1.0, "speculation/drafter_version": 3.0, f"speculation/share_{KIND}-3": 1.0}
    assert not [line for line in check.add(row) if "never chose" in line]
    assert [line for line in check.add({**row, f"speculation/share_{KIND}-3": 0.0}) if "never chose" in line]


def test_a_resolved_config_names_it(user_kind: None, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {recipe: {}}\ntasks: [{name: gcd}]\nrollout: {max_prompt_tokens: 64, max_response_tokens: 64}\n"
        f"speculation: {{drafter: {KIND}}}\ndrafter: {{kind: {KIND}}}\n"
    )
    config = load_config(path)
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
    assert load_resolved(tmp_path / "resolved.yaml") == config
    with pytest.raises(ConfigError, match=r"speculation.drafter: found eagle3; allowed where one is trained: .*KIND"):
        load_config(path, ["speculation.drafter=eagle3"])


def test_its_folder_names_the_kind_and_reloads(user_kind: None, target_folder: Path, tmp_path: Path) -> None:
    model = drafter_from_target(target_folder, KIND, seed=1)
    assert type(model).__name__ == "Head"
    save_drafter(model, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["drafter_kind"] == KIND and config["architectures"] == ["LlamaForCausalLMEagle3"]
    shared = SharedWeights.from_folder(target_folder)
    for found in (
        load_drafter(tmp_path / "head", read_hf_config(target_folder), KIND, shared),
        load_without_target(tmp_path / "head"),
    ):
        assert type(found) is type(model)
        assert all(tensor.equal(model.state_dict()[name]) for name, tensor in found.state_dict().items())
    save_drafter(drafter_from_target(target_folder, "eagle3", seed=1), tmp_path / "plain")
    assert "drafter_kind" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert load_without_target(tmp_path / "plain").kind == "eagle3"


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        (DrafterConfig, {"kind": "magic"}, "found 'magic'; allowed: 'eagle', 'eagle3', or the import path"),
        (SpeculationConfig, {"drafter": "magic"}, "found 'magic'; allowed: 'ngram', 'suffix', 'eagle', 'eagle3', or"),
        (DrafterConfig, {"kind": "ngram"}, "found 'ngram'; allowed: 'eagle', 'eagle3'"),
        (DrafterConfig, {"kind": "no.such.KIND"}, "found 'no.such.KIND'; 'no.such' cannot be imported"),
        (DrafterConfig, {"kind": f"{MODULE}.OTHER"}, "not a megatron_tlt.config.drafter_kinds.DrafterKind"),
        (SpeculationConfig, {"drafter": f"{MODULE}.KIN"}, "did you mean KIND?"),
        (AdaptiveConfig, {"strategies": ["magic-3"]}, "strategies.0"),
    ],
)
def test_a_wrong_kind_is_named(user_kind: None, section: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        section(**values)
    assert said in str(error.value)


def test_a_kind_with_the_model_of_another_kind_is_refused(user_kind: None, target_folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{MODULE}.Unnamed has kind 'eagle3'; allowed: '{MODULE}.UNNAMED'"):
        drafter_from_target(target_folder, f"{MODULE}.UNNAMED", seed=1)
    with pytest.raises(ConfigError, match=rf"model of drafter.kind {MODULE}.ABSENT: .* no class 'Absent'"):
        drafter_from_target(target_folder, f"{MODULE}.ABSENT", seed=1)
    with pytest.raises(ValueError, match="num_aux_layers is 2; allowed: 0 or 3"):
        DrafterKind("two", "m.M", "eagle3", "A", num_aux_layers=2, own_head=True)
    assert kind_of("eagle") is KINDS["eagle"] and not set(KINDS) & set(MODEL_FREE)
