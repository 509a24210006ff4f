"""Router replay: Megatron's routers take the experts that the engine chose (Ma et al. 2025, arXiv:2510.11370).

The router keeps its gradient. Where only the choice is the engine's, the weights of the chosen experts are computed
from the actor's own logits. Where the weights are the engine's too, they are the value, and the gradient is that of the
actor's logits at these weights (straight through).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_tlt.actor.batches import MicroBatch
from megatron_tlt.data.routes import RouteFormat, Routes
from megatron_tlt.platform.device import current_device

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LayerRoutes:
    """One layer's part of :class:`Routes`: numbers and weights (T, K), and the tokens that have any."""

    ids_TK: torch.Tensor
    is_known_T: torch.Tensor
    weights_TK: torch.Tensor | None

    @classmethod
    def of(cls, routes: Routes, layer: int) -> LayerRoutes:
        weights = None if routes.weights_TLK is None else routes.weights_TLK[:, layer].contiguous()
        return cls(routes.ids_TLK[:, layer].contiguous(), routes.is_known_T, weights)

    def scores(self, own_TE: torch.Tensor, *, are_probabilities: bool) -> torch.Tensor:
        """Scores (T, K) of the experts; the gradient is that of ``own_TE``, the router's scores."""
        own = own_TE.gather(1, self.ids_TK)
        if self.weights_TK is None:
            return own
        # a weight that was rounded to 0 stays finite
        theirs = self.weights_TK if are_probabilities else self.weights_TK.clamp_min(2.0**-24).log()
        return own + torch.where(self.is_known_T[:, None], theirs.to(own.dtype) - own.detach(), 0.0)


class ReplayedRouter:
    """What one layer's router asks for its experts in one pass, in place of Megatron's ``RouterReplay``.

    ``routes`` are those of the micro-batch in the forward pass. A recomputed layer runs forward without gradients and
    again, in the same order of micro-batches, with them.

    Args:
        scores_are_probabilities: the softmax comes before the choice (``moe_router_pre_softmax``).
        training: a backward pass follows.
    """

    def __init__(self, *, scores_are_probabilities: bool, training: bool) -> None:
        self.routes: LayerRoutes | None = None
        self.agreement = torch.zeros(2, dtype=torch.float64, device=current_device().torch_device)
        """Tokens whose own choice is the engine's, and all tokens that have one; (2) float64."""
        self._scores_are_probabilities, self._training = scores_are_probabilities, training
        self._again: deque[LayerRoutes] = deque()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores (tokens, k) and numbers (tokens, k) of each token's experts."""
        if torch.is_grad_enabled() and self._again:
            routes = self._again.popleft()
        else:
            assert self.routes is not None
            routes = self.routes
            if self._training and not torch.is_grad_enabled():
                self._again.append(routes)
            own = default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1]
            same = (own.sort(dim=1).values == routes.ids_TK.sort(dim=1).values).all(dim=1)
            self.agreement += torch.stack([(same & routes.is_known_T).sum(), routes.is_known_T.sum()])
        return routes.scores(scores, are_probabilities=self._scores_are_probabilities), routes.ids_TK


class RouterReplays:
    """The routers of a policy's chunks on this rank; they are as they were outside of a pass that replays.

    Args:
        chunks: the model's; dense ones have no routers.
        config: Megatron's.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig) -> None:
        self._routers = [[one for one in chunk.modules() if isinstance(one, TopKRouter)] for chunk in chunks]
        self._config = config
        self._format: RouteFormat | None = None

    def begin(self, *, training: bool, has_routes: bool) -> None:
        """Starts a pass over micro-batches; ``has_routes``: they have experts, the same on every rank."""
        config, self._format = self._config, None
        for router in self._all():
            router.router_replay = None
        if not has_routes:
            return
        assert config.num_moe_experts is not None
        self._format = RouteFormat(config.num_layers, config.moe_router_topk, config.num_moe_experts)
        for router in self._all():
            router.router_replay = ReplayedRouter(
                scores_are_probabilities=config.moe_router_pre_softmax, training=training
            )

    def load(self, chunk: int, batch: MicroBatch) -> None:
        """Sets the experts of a micro-batch of this context rank, before a chunk's forward pass."""
        if self._format is None:
            return
        assert batch.routes_RTF is not None
        # Megatron flattens (positions, rows); under sequence parallelism a rank has a share of the positions
        bytes_TRF = batch.routes_RTF.transpose(0, 1)
        if self._config.sequence_parallel:
            size = parallel_state.get_tensor_model_parallel_world_size()
            bytes_TRF = bytes_TRF.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        routes = self._format.decode(bytes_TRF.reshape(-1, bytes_TRF.shape[-1]))
        for router in self._routers[chunk]:
            router.router_replay.routes = LayerRoutes.of(routes, router.layer_number - 1)

    def end(self) -> float | None:
        """Ends the pass; the share of (token, layer) in which the own choice was the engine's. A collective.

        None, without a collective, if the pass replays nothing.
        """
        if self._format is None:
            return None
        sums = torch.zeros(2, dtype=torch.float64, device=current_device().torch_device)
        for router in self._all():
            sums += router.router_replay.agreement
            router.router_replay = None
        dist.all_reduce(sums)
        same, total = sums.tolist()
        return same / total if total else None

    def _all(self) -> list[TopKRouter]:
        return [router for chunk in self._routers for router in chunk]
