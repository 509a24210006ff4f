"""A recipe's folder follows everything its model depends on, and nothing else."""

from __future__ import annotations

from typing import Any

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.models.recipe import recipe_folder, warm_up_optimizer


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
    assert found == {"optimizer": own, "optimizer_arguments": {}}
