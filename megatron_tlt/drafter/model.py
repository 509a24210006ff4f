"""What EAGLE and EAGLE-3 have in common: a draft step, and the target's tensors that they share."""

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
    """The target's weights by their Hugging Face names: a ``SafetensorsFolder``, or a policy that is loaded."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class SharedWeights:
    """The target's token embedding and LM head, both (V, H): used, never trained, never saved with a drafter."""

    embedding: torch.Tensor
    head: torch.Tensor

    @classmethod
    def of(cls, weights: TargetTensors, tied: bool) -> SharedWeights:
        """Read in the dtype they are held in; a tied head is the embedding itself.

        Raises:
            ConfigError: one of the two cannot be read.
        """
        embedding = weights.read("model.embed_tokens.weight")
        return cls(embedding, embedding if tied else weights.read("lm_head.weight"))

    @classmethod
    def from_folder(cls, folder: Path) -> SharedWeights:
        """Those of a Hugging Face folder; raises ConfigError as ``of``, and where the folder cannot be read."""
        return cls.of(SafetensorsFolder(folder), bool(read_hf_config(folder).tie_word_embeddings))

    def to(self, device: torch.device) -> SharedWeights:
        """The same on ``device``; still one tensor where they are tied."""
        embedding = self.embedding.detach().to(device)
        return SharedWeights(embedding, embedding if self.head is self.embedding else self.head.detach().to(device))


def project(hidden_TH: torch.Tensor, head_VH: torch.Tensor) -> torch.Tensor:
    """Logits in float32, multiplied in the head's dtype: (T, V)."""
    return F.linear(hidden_TH.to(head_VH.dtype), head_VH).float()


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A drafter's tensor in ``dtype``; its table of a draft vocabulary stays integers."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class DraftModel(nn.Module, ABC):
    """A drafter over packed sequences.

    Position t takes token x_{t+1} and the target's hidden state h_t, has rotary position t and predicts h_{t+1} and
    with it x_{t+2}; unrolled step j takes x_{t+1+j} and the drafter's own feature of step j - 1, has rotary position
    t + j and predicts x_{t+2+j}. That is vLLM's alignment: token ids are shifted by one against the target's positions
    and hidden states.
    """

    kind: ClassVar[Kind]
    """As ``drafter.kind`` names it."""
    #: Its weights are those that ``drafter_from_target`` gave it: the first training step scales them to the data.
    from_target = False

    def __init__(self, config: PretrainedConfig, shared: SharedWeights) -> None:
        super().__init__()
        self.config = config
        self.share(shared)

    def share(self, shared: SharedWeights) -> None:
        """Takes the target's embedding and head of now: the target goes on being trained.

        Raises:
            ConfigError: they have another shape than the drafter's.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, tensor in (("embedding", shared.embedding), ("LM head", shared.head)):
            if tuple(tensor.shape) != expected:
                raise ConfigError(f"the target's {name} is {tuple(tensor.shape)}; the drafter asks for {expected}")
        self.shared = shared

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """Width of the hidden states it takes, F: H, or 3 H of three layers."""

    @property
    @abstractmethod
    def entry_size(self) -> int:
        """Width of an entry's hidden states, E: it takes the first F columns, the losses the last H.

        These are the target's states behind its final norm, whose distribution is the LM head over them.
        """

    @property
    @abstractmethod
    def head_DH(self) -> torch.Tensor:
        """The LM head behind :meth:`forward`, a row for each token that can be drafted."""

    @property
    def draft_ids_D(self) -> torch.Tensor | None:
        """The target's ids of the tokens that can be drafted, ascending; None where all can be."""
        return None

    @abstractmethod
    def set_start(self, rms_E: torch.Tensor, scale: float) -> None:
        """Makes a drafter whose output projections are zero repeat the target's feature, times ``scale``.

        ``rms_E`` is the root mean square of each column of an entry's hidden states.
        """

    def choose_vocabulary(self, weights_V: torch.Tensor) -> None:
        """Drafts the tokens of largest weight from now on, where it cannot draft all; equal weights by lower id."""

    @abstractmethod
    def combine(self, hidden_TF: torch.Tensor) -> torch.Tensor:
        """The target's hidden states (T, feature size) as step 0's features (T, H)."""

    @abstractmethod
    def forward(
        self, token_ids_T: torch.Tensor, features_TH: torch.Tensor, context: UnrolledContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step: (what the LM head reads, features of the next step), each (T, H)."""

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """(T, H) in float32."""
        return F.embedding(token_ids_T, self.shared.embedding).float()

    def start(self, hidden_TF: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, UnrolledContext]:
        """Step 0's features and the context of a pack of sequences of ``lengths``."""
        return self.combine(hidden_TF.float()), UnrolledContext(lengths, hidden_TF.device)
