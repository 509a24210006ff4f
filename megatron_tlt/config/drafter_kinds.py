"""The registry of drafter model kinds; plain data, imports no torch.

A kind combines a model class that is trained here with the format in which vLLM loads it. ``drafter.kind`` and
``speculation.drafter`` take a name of :data:`KINDS` or the import path of a :class:`DrafterKind` in a user's package.
Strategies and metrics use the name in the config: ``eagle3-5``, ``mypackage.heads.KIND-5``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from megatron_tlt.config.import_path import is_import_path, load_object
from megatron_tlt.errors import ConfigError

MODEL_FREE = ("ngram", "suffix")
"""Model-free drafters."""
PATH_PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"
"""Pattern of a kind's import path within a strategy name."""


@dataclass(frozen=True)
class DrafterKind:
    """One kind of drafter model. Each response keeps ``num_aux_layers + 1`` hidden states of the target per token.

    Attributes:
        title: name in messages.
        model: import path of its class, a subclass of ``drafter.model.DraftModel`` whose ``kind`` is this kind's name.
        method: vLLM's name of the speculative method.
        architecture: in its folder's ``config.json``; selects the model class in vLLM's registry.
        num_aux_layers: number of target layers whose hidden states it reads: 3, or 0 if it reads only the last state.
        own_head: whether it has its own LM head, and so can draft a part of the vocabulary
            (``drafter.draft_vocab_size``).
        lr: default of ``drafter.lr``.
        unroll_steps: default of ``drafter.unroll_steps``.
        regression_weight: default of ``drafter.loss.regression_weight`` with loss ``eagle``; None: there is no such
            loss, because its feature is not the target's hidden state.

    Raises:
        ValueError: num_aux_layers is neither 0 nor 3.
    """

    title: str
    model: str
    method: Literal["eagle", "eagle3"]
    architecture: str
    num_aux_layers: int
    own_head: bool
    lr: float = 3e-4
    unroll_steps: int = 3
    regression_weight: float | None = None

    def __post_init__(self) -> None:
        if self.num_aux_layers not in (0, 3):
            raise ValueError(f"num_aux_layers is {self.num_aux_layers}; allowed: 0 or 3")

    @property
    def states_per_token(self) -> int:
        """Hidden states of the target stored per token of a response: the auxiliary layers' and the last one."""
        return self.num_aux_layers + 1


#: Name in a config -> kind.
KINDS = {
    "eagle": DrafterKind(
        title="EAGLE",
        model="megatron_tlt.drafter.eagle.Eagle",
        method="eagle",
        architecture="LlamaForCausalLM",
        num_aux_layers=0,
        own_head=False,
        lr=1e-4,
        regression_weight=0.5,
    ),
    "eagle3": DrafterKind(
        title="EAGLE-3",
        model="megatron_tlt.drafter.eagle3.Eagle3",
        method="eagle3",
        architecture="LlamaForCausalLMEagle3",
        num_aux_layers=3,
        own_head=True,
    ),
}
_loaded: dict[str, DrafterKind] = {}


def kind_of(name: str) -> DrafterKind:
    """The kind with this name or import path.

    Raises:
        ConfigError: there is no such kind; the message begins with ``found``.
    """
    if name in KINDS:
        return KINDS[name]
    if not is_import_path(name):
        raise ConfigError(
            f"found {name!r}; allowed: {', '.join(map(repr, KINDS))}, or the import path of a DrafterKind such as "
            "mypackage.heads.KIND"
        )
    if name not in _loaded:
        what = "a megatron_tlt.config.drafter_kinds.DrafterKind"
        try:
            _loaded[name] = load_object(name, "", lambda item: isinstance(item, DrafterKind), "DrafterKind", what)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix(": ")) from error
    return _loaded[name]


def model_drafters() -> tuple[str, ...]:
    """The names of all kinds known in this process: those of ``KINDS``, and users' kinds that a config named."""
    return (*KINDS, *_loaded)


def _known_kind(name: str) -> str:
    try:
        kind_of(name)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return name


def _known_drafter(name: str) -> str:
    if name in MODEL_FREE or name in KINDS or is_import_path(name):
        return name if name in MODEL_FREE else _known_kind(name)
    names = ", ".join(map(repr, (*MODEL_FREE, *KINDS)))
    raise ValueError(f"found {name!r}; allowed: {names}, or the import path of a DrafterKind")


KindName = Annotated[str, AfterValidator(_known_kind)]
"""Type of a config value that names a drafter model."""
DrafterName = Annotated[str, AfterValidator(_known_drafter)]
"""Type of a config value that names a drafter, with or without a model."""


def kind_default(values: Any, default: str) -> DrafterKind | None:
    """The kind that a raw ``drafter`` section names; None if it is invalid, which the field's validation reports."""
    name = values.get("kind", default) if isinstance(values, dict) else None
    try:
        return kind_of(name) if isinstance(name, str) else None
    except ConfigError:
        return None
