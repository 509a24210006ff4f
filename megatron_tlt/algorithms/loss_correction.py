"""Which corrections of ``algorithm.correction`` a loss applies. Importing this module is cheap."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from megatron_tlt.algorithms.registry import ALGORITHMS, LOSSES, build_algorithm, build_loss
from megatron_tlt.config.import_path import one_line
from megatron_tlt.config.schedule import trains_on_other_policies
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    from megatron_tlt.algorithms.losses import Loss

_ATTRIBUTE = "corrections"
_KNOWN = frozenset({"weights", "opsm_delta", "bypass"})


def correction_problems(config: TltConfig) -> list[str]:
    """One line per key of the correction that the run's loss does not declare to apply.

    The batch brings a correction to the loss as a column, so a user's loss that does not read the column would train
    on the tokens of other policies as if they were its own. Imports torch only for users' classes.
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
    if not isinstance(declared, tuple | list | set | frozenset) or not _KNOWN.issuperset(declared):
        return [f"{where} has {_ATTRIBUTE} = {declared!r}; allowed: a tuple of {', '.join(sorted(_KNOWN))}"]
    return [
        f"{where} has no {name} in its {_ATTRIBUTE}; {key} needs a loss that {does}; allowed: clipped, gspo, cispo, or "
        f"a class that does so, with {_ATTRIBUTE} = ('{name}',) (docs/extending.md)"
        for name, methods, key, does in asked
        if name not in declared_corrections(loss, *methods)
    ]


def declared_corrections(loss: Loss, *methods: str) -> Collection[str]:
    """What ``loss`` declares in its ``corrections``, for its own version of ``methods``.

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


def _asked(config: TltConfig) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """What the config asks of the loss: a correction, the methods that apply it, the key, and what they do."""
    section, correction = "algorithm.correction", config.algorithm.correction
    weighs = "multiplies the loss of each token by token_weights_BT"
    if correction.weights != "none":
        yield "weights", ("__call__",), f"{section}.weights: {correction.weights}", weighs
    elif correction.token_bounds is not None:
        yield "weights", ("__call__",), f"{section}.token_bounds", weighs
    if correction.opsm_delta is not None:
        yield "opsm_delta", ("__call__",), f"{section}.opsm_delta", "leaves out responses by it"
    if correction.bypass and trains_on_other_policies(config):
        key = f"{section}.bypass with tokens of other policies"
        yield "bypass", ("__call__", "surrogate"), key, "takes the ratio to old_log_probs_BT"
