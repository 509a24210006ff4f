"""The base class of EAGLE and EAGLE-3: a draft step, and the target's tensors that both share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from megatron_tlt.drafter.layers import UnrolledContext
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf_folder import SafetensorsFolder, read_hf_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Kind = str
"""The name or import path of a kind (``config/drafter_kinds.py``)."""


class TargetTensors(Protocol):
    """The target's weights by Hugging Face name: a ``SafetensorsFolder`` or a loaded policy."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class SharedWeights:
    """The target's token embedding and LM head, both (V, H); never trained and never saved with a drafter."""

    embedding: torch.Tensor
    head: torch.Tensor

    @classmethod
    def of(cls, weights: TargetTensors, tied: bool) -> SharedWeights:
        """Read both in their stored dtype; a tied head is the embedding itself.

        Raises:
            ConfigError: one of the two cannot be read.
        """
        embedding = weights.read("model.embed_tokens.weight")
        return cls(embedding, embedding if tied else weights.read("lm_head.weight"))

    @classmethod
    def from_folder(cls, folder: Path) -> SharedWeights:
        """Read both from a Hugging Face folder; raises ConfigError as ``of``, or if the folder cannot be read."""
        return cls.of(SafetensorsFolder(folder), bool(read_hf_config(folder).tie_word_embeddings))

    def to(self, device: torch.device) -> SharedWeights:
        """Copies on ``device``; a tied pair remains one tensor."""
        embedding = self.embedding.detach().to(device)
        return SharedWeights(embedding, embedding if self.head is self.embedding else self.head.detach().to(device))


def project(hidden_TH: torch.Tensor, head_VH: torch.Tensor) -> torch.Tensor:
    """Logits (T, V) in float32, multiplied in the head's dtype."""
    return F.linear(hidden_TH.to(head_VH.dtype), head_VH).float()


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A drafter's tensor in ``dtype``; the draft vocabulary's table keeps its integer dtype."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class DraftModel(nn.Module, ABC):
    """A drafter over packed sequences.

    Position t takes token x_{t+1} and the target's hidden state h_t, has rotary position t, and predicts h_{t+1}, from
    which the LM head predicts x_{t+2}. Unrolled step j takes x_{t+1+j} and the drafter's own feature of step j - 1, has
    rotary position t + j, and predicts x_{t+2+j}. This is vLLM's alignment: token ids are shifted by one against the
    target's positions and hidden states.
    """

    kind: ClassVar[Kind]
    """The name of its kind in ``drafter.kind``."""
    #: Set by ``drafter_from_target``: the weights are still initial, and the first training step scales them to data.
    from_target = False

    def __init__(self, config: PretrainedConfig, shared: SharedWeights) -> None:
        super().__init__()
        self.config = config
        self.share(shared)

    def share(self, shared: SharedWeights) -> None:
        """Use the target's current embedding and head, which change as the target is trained.

        Raises:
            ConfigError: their shape differs from the drafter's.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, tensor in (("embedding", shared.embedding), ("LM head", shared.head)):
            if tuple(tensor.shape) != expected:
                raise ConfigError(f"the target's {name} is {tuple(tensor.shape)}; the drafter asks for {expected}")
        self.shared = shared

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """Width F of the hidden states it reads: H, or 3 H from three layers."""

    @property
    @abstractmethod
    def entry_size(self) -> int:
        """Width E of an entry's hidden states: the drafter reads the first F columns, the losses the last H.

        The last H columns are the target's states after its final norm, to which the LM head applies.
        """

    @property
    @abstractmethod
    def head_DH(self) -> torch.Tensor:
        """The LM head applied to the result of :meth:`forward`, one row per token that can be drafted."""

    @property
    def draft_ids_D(self) -> torch.Tensor | None:
        """The target's ids of the tokens that can be drafted, ascending; None if all can be drafted."""
        return None

    @abstractmethod
    def set_start(self, rms_E: torch.Tensor, scale: float) -> None:
        """Make a drafter with zero output projections repeat the target's feature times ``scale``.

        ``rms_E`` is the root mean square of each column of an entry's hidden states.
        """

    def choose_vocabulary(self, weights_V: torch.Tensor) -> None:
        """Choose the tokens of largest weight as draft vocabulary, if it is a part; ties go to the lower id."""

    @abstractmethod
    def combine(self, hidden_TF: torch.Tensor) -> torch.Tensor:
        """Step 0's features (T, H) from the target's hidden states (T, feature size)."""

    @abstractmethod
    def forward(
        self, token_ids_T: torch.Tensor, features_TH: torch.Tensor, context: UnrolledContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step: (input of the LM head, features of the next step), each (T, H)."""

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Token embeddings (T, H) in float32."""
        return F.embedding(token_ids_T, self.shared.embedding).float()

    def start(self, hidden_TF: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, UnrolledContext]:
        """Step 0's features and the context of a pack of sequences of ``lengths``."""
        return self.combine(hidden_TF.float()), UnrolledContext(lengths, hidden_TF.device)
