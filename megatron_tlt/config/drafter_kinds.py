"""The kinds of drafter models: the one place that names them. Plain data; importing this imports no torch.

A kind is a model class that trains here and the form in which vLLM loads it. ``drafter.kind`` and
``speculation.drafter`` take a name of :data:`KINDS` or the import path of a :class:`DrafterKind` of a user's package.
Strategies and metrics call a kind by what the config calls it: ``eagle3-5``, ``mypackage.heads.KIND-5``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from megatron_tlt.config.import_path import is_import_path, load_object
from megatron_tlt.errors import ConfigError

MODEL_FREE = ("ngram", "suffix")
"""Drafters without a model."""
PATH_PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"
"""The import paths of kinds, as a part of a strategy's name."""


@dataclass(frozen=True)
class DrafterKind:
    """One kind of drafter model. Each response keeps ``num_aux_layers + 1`` hidden states of the target per token.

    Attributes:
        title: in messages.
        model: import path of its class, a subclass of ``drafter.model.DraftModel`` whose ``kind`` is this kind's name.
        method: vLLM's name of the method that drafts with it.
        architecture: in its folder's ``config.json``; vLLM builds the model class that it registers under this name.
        num_aux_layers: hidden states of the target's layers that it reads: 3, or 0 where it reads the last one alone.
        own_head: it has an LM head of its own, and can draft a part of the vocabulary (``drafter.draft_vocab_size``).
        lr: ``drafter.lr`` unless given.
        unroll_steps: ``drafter.unroll_steps`` unless given.
        regression_weight: ``drafter.loss.regression_weight`` with loss ``eagle`` unless given; None: its feature is not
            the target's hidden state, so there is no such loss.

    Raises:
        ValueError: another number of num_aux_layers.
    """

    title: str
    model: str
    method: Literal["eagle", "eagle3"]
    architecture: str
    num_aux_layers: int
    own_head: bool
    lr: float = 3e-4
    unroll_steps: int = 4
    regression_weight: float | None = None

    def __post_init__(self) -> None:
        if self.num_aux_layers not in (0, 3):
            raise ValueError(f"num_aux_layers is {self.num_aux_layers}; allowed: 0 or 3")

    @property
    def states_per_token(self) -> int:
        """Hidden states of the target that a response keeps per token: the auxiliary layers' and the last one."""
        return self.num_aux_layers + 1


#: The name that a config gives -> the kind.
KINDS = {
    "eagle": DrafterKind(
        title="EAGLE",
        model="megatron_tlt.drafter.eagle.Eagle",
        method="eagle",
        architecture="LlamaForCausalLM",
        num_aux_layers=0,
        own_head=False,
        lr=1e-4,
        unroll_steps=3,
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
    """The kind that a config calls ``name``.

    Raises:
        ConfigError: no kind has this name, or there is none at this import path; the message begins with ``found``.
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
    """The names of all kinds that there are in this process: those of ``KINDS``, and of users' that a config names."""
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
"""In a config: a drafter model."""
DrafterName = Annotated[str, AfterValidator(_known_drafter)]
"""In a config: a drafter, with a model or without."""


def kind_default(values: Any, default: str) -> DrafterKind | None:
    """The kind that a raw ``drafter`` section names; None where it is wrong, which its own validation reports."""
    name = values.get("kind", default) if isinstance(values, dict) else None
    try:
        return kind_of(name) if isinstance(name, str) else None
    except ConfigError:
        return None
