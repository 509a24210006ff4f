"""A recipe's folder follows everything its model depends on, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_tlt.config.checks import check_fields_together
from megatron_tlt.config.model import architecture_file
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.models.recipe import recipe_description, recipe_folder, warm_up_optimizer


def config(actor: dict[str, Any] | None = None, warm_up: dict[str, Any] | None = None, **options: Any) -> TltConfig:
    recipe = {"supervised": {"optimizer": warm_up or {}}}
    return TltConfig.model_validate(
        {"model": {"recipe": recipe}, "tasks": [{"name": "gcd"}], "actor": {"optimizer": actor or {}, **options}}
    )


def test_what_the_warm_up_inherits_changes_the_folder() -> None:
    plain = recipe_folder(config())
    assert recipe_folder(config({"clip_grad": 0.5})) != plain
    assert recipe_folder(config({"optimizer": "torch.optim.NAdam"}, optimizer_arguments={"eps": 1e-6})) != plain


def test_what_the_recipe_says_itself_is_not_the_actors_to_change() -> None:
    own = {"lr": 1e-3, "optimizer": "adam"}
    assert recipe_folder(config({"lr": 1e-5}, own)) == recipe_folder(config({"lr": 1e-6}, own))
    found = warm_up_optimizer(config({"optimizer": "torch.optim.NAdam"}, own, optimizer_arguments={"eps": 1e-6}))
    assert (found["optimizer"], found["optimizer_arguments"]) == (own, {})


def test_a_split_makes_another_model_and_its_absence_the_one_of_earlier_releases() -> None:
    muon = {"optimizer": "torch.optim.Muon"}
    folders = {
        recipe_folder(config(muon, {}, optimizer_split=split)).name for split in (None, {"lr": 1e-3}, {"lr": 2e-3})
    }
    assert len(folders) == 3
    own = {"optimizer": "adam", "lr": 1e-3}
    assert warm_up_optimizer(config(muon, own, optimizer_split={"lr": 1e-3}))["optimizer_split"] is None


def test_solutions_that_end_in_another_format_are_of_another_model() -> None:
    """Earlier releases ended them in the marker, whatever format the task asked for; others' folders stay."""
    files = [
        {"kind": "file", "name": "a", "path": "a.jsonl", "verifier": "math", "answer_format": f}
        for f in (None, "boxed")
    ]
    plain, boxed = (TltConfig.model_validate({"model": {"recipe": {}}, "tasks": [task]}) for task in files)
    assert "solutions" in recipe_description(boxed) and "solutions" not in recipe_description(plain)


def test_folders_of_earlier_releases_are_found_again_whatever_verifies() -> None:
    assert recipe_folder(config()).name == "210be9169328"
    tasks = [{"name": "gcd", "verifier": "math"}]
    assert recipe_folder(TltConfig.model_validate({"model": {"recipe": {}}, "tasks": tasks})).name == "210be9169328"


def with_base(base: Path, **recipe: Any) -> TltConfig:
    (base / "config.json").write_text('{"max_position_embeddings": 64}')
    (base / "model.safetensors").write_bytes(b"first")
    return TltConfig.model_validate({"model": {"recipe": {"base": base, **recipe}}, "tasks": [{"name": "gcd"}]})


def test_the_weights_of_the_base_change_the_folder_and_its_place_does_not(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    one, other = with_base(tmp_path / "one"), with_base(tmp_path / "other")
    assert recipe_folder(one) == recipe_folder(other) != recipe_folder(config())
    (tmp_path / "other" / "model.safetensors").write_bytes(b"other")
    assert recipe_folder(one) != recipe_folder(other)


def test_a_base_brings_its_architecture_and_tokenizer(tmp_path: Path) -> None:
    checked = with_base(tmp_path)
    assert architecture_file(checked) == tmp_path / "config.json"
    (line,) = (line for line in check_fields_together(checked) if "max_sequence_tokens" in line)
    assert "found 512; allowed: at most max_position_embeddings = 64" in line
    with pytest.raises(ValidationError, match="architecture is given, but base has its own"):
        with_base(tmp_path, architecture={"hidden_size": 64})
    gone = TltConfig.model_validate({"model": {"recipe": {"base": tmp_path / "gone"}}, "tasks": [{"name": "gcd"}]})
    assert f"model.recipe.base: no folder {tmp_path / 'gone'}" in "\n".join(check_fields_together(gone))
