"""Which keys of the ``algorithm`` section a loss applies. Importing this module is cheap."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from megatron_tlt.algorithms.registry import ALGORITHMS, LOSSES, build_algorithm, build_loss
from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.config.import_path import one_line
from megatron_tlt.config.schedule import trains_on_other_policies
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    from megatron_tlt.algorithms.losses import Loss

_ATTRIBUTE = "applies"
_METHODS = {
    "correction.weights": ("__call__",),
    "correction.opsm_delta": ("__call__",),
    "correction.bypass": ("__call__", "surrogate"),
    "kl.coefficient": ("__call__",),
    "entropy_coefficient": ("__call__",),
    "loss_aggregation": ("__call__", "denominator"),
    "clip_low": ("__call__", "surrogate"),
    "clip_high": ("__call__", "surrogate"),
    "dual_clip": ("__call__", "surrogate"),
}
"""What a loss can declare, and the methods that do it in ``PolicyLoss`` and its subclasses."""


def ignored_keys(config: TltConfig) -> list[str]:
    """One line per key of the section that the config sets and the run's loss does not declare to apply.

    A user's loss that does not read a key would train as if it were not there: without a correction, for one, on the
    tokens of other policies as if they were its own. Imports torch only for users' classes.
    """
    algorithm = config.algorithm
    asked = list(_asked(config))
    if not asked or (algorithm.name in ALGORITHMS and algorithm.loss in LOSSES):
        return []
    try:
        if algorithm.name in ALGORITHMS:
            where, loss = f"algorithm.loss: found {algorithm.loss!r}, which", build_loss(algorithm)
        else:
            loss = build_algorithm(algorithm).loss()
            where = f"algorithm.name: found {algorithm.name!r}, whose loss {type(loss).__name__}"
        declared = getattr(loss, _ATTRIBUTE, ())
    except ConfigError:
        return []  # reported by algorithm_problems
    except Exception as error:  # a user's method may raise anything
        return [
            f"algorithm.name: found {algorithm.name!r}; its loss() or {_ATTRIBUTE} raises where tlt starts, without "
            f"other ranks: {one_line(error)}"
        ]
    if not isinstance(declared, tuple | list | set | frozenset) or not _METHODS.keys() >= set(declared):
        return [f"{where} has {_ATTRIBUTE} = {declared!r}; allowed: a tuple of {', '.join(_METHODS)}"]
    return [
        f"{where} does not name {key} in {_ATTRIBUTE}; algorithm.{found} needs a loss that {does}; allowed: clipped, "
        f"gspo, cispo, or a class that does so, with {_ATTRIBUTE} = ('{key}',) (docs/extending.md)"
        for key, found, does in asked
        if key not in applied_keys(loss, *_METHODS[key])
    ]


def unapplied_recipe_keys(config: TltConfig) -> list[str]:
    """The keys that have the value of the recipe ``algorithm.name``, which a user's loss does not declare to apply.

    They are not asked of the loss, as the config may not set them; :func:`ignored_keys` is about the others. Zero asks
    for nothing.
    """
    algorithm = config.algorithm
    keys = [key for key, value in algorithm.recipe_values.items() if key in _METHODS and value]
    if not keys or algorithm.loss in LOSSES:
        return []
    try:
        loss = build_loss(algorithm)
    except ConfigError:
        return []  # reported by algorithm_problems
    if not isinstance(getattr(loss, _ATTRIBUTE, ()), tuple | list | set | frozenset):
        return keys
    return [key for key in keys if key not in applied_keys(loss, *_METHODS[key])]


def applied_keys(loss: Loss, *methods: str) -> Collection[str]:
    """What ``loss`` declares in ``applies``, for its own version of ``methods``.

    A class that replaces one of them takes the promise of its base class back, unless it repeats it.
    """
    declared: Collection[str] = getattr(loss, _ATTRIBUTE, ())
    if _ATTRIBUTE in getattr(loss, "__dict__", {}):
        return declared
    for cls in type(loss).__mro__:
        if _ATTRIBUTE in vars(cls):
            return declared
        if any(name in vars(cls) for name in methods):
            return ()
    return ()


def _asked(config: TltConfig) -> Iterator[tuple[str, str, str]]:
    """What the config asks of the loss: a key of ``_METHODS``, the key and value that ask for it, and what to do."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    weighs = "multiplies the loss of each token by token_weights_BT"
    if correction.weights != "none":
        yield "correction.weights", f"correction.weights: {correction.weights}", weighs
    elif correction.token_bounds is not None:
        yield "correction.weights", "correction.token_bounds", weighs
    if correction.opsm_delta is not None:
        yield "correction.opsm_delta", "correction.opsm_delta", "leaves out responses by it"
    if correction.bypass and trains_on_other_policies(config):
        found = "correction.bypass with tokens of other policies"
        yield "correction.bypass", found, "takes the ratio to old_log_probs_BT"
    if algorithm.kl.coefficient and algorithm.kl.placement == "loss":
        found = f"kl.coefficient: {algorithm.kl.coefficient:g}"
        yield "kl.coefficient", found, "adds the estimate against reference_log_probs_BT"
    if algorithm.entropy_coefficient:
        yield "entropy_coefficient", f"entropy_coefficient: {algorithm.entropy_coefficient:g}", "subtracts entropy_BT"
    by_recipe = algorithm.recipe_values
    for key in ("loss_aggregation", "clip_low", "clip_high", "dual_clip"):
        if (value := getattr(algorithm, key)) != AlgorithmConfig.model_fields[key].default and key not in by_recipe:
            yield key, f"{key}: {value}", "reads it from the section"
