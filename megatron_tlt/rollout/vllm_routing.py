"""The experts that vLLM chose for each token, recorded while it decodes (first model runner)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, takewhile
from typing import Any

import torch

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.data.routes import RouteFormat
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rollout.recorded_states import joined_rows
from megatron_tlt.rollout.types import Response

Routing = tuple[torch.Tensor, torch.Tensor]


class RoutingRecorder:
    """Records every token's experts in all layers of a mixture of experts; nothing without ``rollout.router_replay``.

    A layer's choice is copied into a buffer on the device, which a CUDA graph repeats; after a step, the rows of all
    its tokens go to the host in one copy. Rows of rejected drafts are replaced when the right token of that position is
    computed. Where the prefix cache served a prompt's start, its rows are those of the request that computed it.

    Args:
        rollout: the config's section.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self._mode = rollout.router_replay
        self._runner: Any = None
        self._pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._requests_of: dict[tuple[int, ...], list[str]] = {}
        """Requests by prompt."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """An engine that is built within the context is recorded; what a graph captures has the copies.

        Raises:
            ConfigError: the model has no experts.
        """
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        # after the weights are loaded and before graphs are captured
        prepare = GPUModelRunner.initialize_kv_cache

        def record_and_prepare(runner: Any, *given: Any, **named: Any) -> None:
            if self._runner is None:
                self._attach(runner)
            prepare(runner, *given, **named)

        if self._mode == "none":
            yield
            return
        GPUModelRunner.initialize_kv_cache = record_and_prepare
        try:
            yield
        finally:
            GPUModelRunner.initialize_kv_cache = prepare

    def _attach(self, runner: Any) -> None:
        routers = [module.router for module in runner.get_model().modules() if _is_layer_of_experts(module)]
        if not routers:
            raise ConfigError(f"rollout.router_replay: found {self._mode}; the model has no experts; allowed: none")
        config, self._runner = runner.model_config, runner
        self._format = RouteFormat(len(routers), config.get_num_experts_per_tok(), config.get_num_experts())
        shape = len(routers), runner.max_num_tokens, self._format.top_k
        self._ids_LTK = torch.zeros(shape, dtype=torch.int32, device=runner.device)
        self._weights_LTK: torch.Tensor | None = None
        if self._mode == "ids_and_weights":
            self._weights_LTK = torch.zeros(shape, dtype=torch.float16, device=runner.device)
        for layer, router in enumerate(routers):
            router._compute_routing = self._recorded(layer, router._compute_routing)
        self._execute, runner.execute_model = runner.execute_model, self._step

    def attach(self, response: Response, internal_id: str) -> Response:
        """The response with ``routes`` of all its tokens but the last, unless it was aborted.

        Raises:
            RunError: some token's experts were not recorded.
        """
        if self._mode == "none" or response.finish_reason == "abort":
            return response
        pieces, prompt = self._pieces.get(internal_id, []), response.prompt_token_ids
        end = len(prompt) + len(response.token_ids) - 1
        first = min((position for position, _ in pieces), default=end)
        rows = joined_rows([*self._prefix_rows(self._requests_of.get(prompt, ()), first), *pieces], end)
        if rows is None:
            others = (ids for other, ids in self._requests_of.items() if other[:first] == prompt[:first])
            rows = joined_rows([*self._prefix_rows(chain.from_iterable(others), first), *pieces], end)
        if rows is None:
            raise RunError(f"request {response.request_id}: vLLM computed tokens whose experts were not recorded")
        return dataclasses.replace(response, routes=rows)

    def clear(self) -> None:
        """Forgets all requests."""
        self._pieces.clear()
        self._requests_of.clear()

    def _prefix_rows(self, requests: Iterable[str], count: int) -> Iterable[tuple[int, torch.Tensor]]:
        """The rows of the first ``count`` tokens of these requests."""
        for request in requests:
            for at, rows in takewhile(lambda piece: piece[0] < count, self._pieces[request]):
                yield at, rows[: count - at]

    def _recorded(self, layer: int, compute: Callable[..., Routing]) -> Callable[..., Routing]:
        def computed(*given: Any, **named: Any) -> Routing:
            weights_TK, ids_TK = compute(*given, **named)
            self._ids_LTK[layer, : len(ids_TK)].copy_(ids_TK)
            if self._weights_LTK is not None:
                self._weights_LTK[layer, : len(ids_TK)].copy_(weights_TK)
            return weights_TK, ids_TK

        return computed

    def _step(self, scheduler_output: Any, *given: Any, **named: Any) -> Any:
        """Replaces the runner's ``execute_model``."""
        result = self._execute(scheduler_output, *given, **named)
        total = scheduler_output.total_num_scheduled_tokens
        if not total:
            return result
        weights = None if self._weights_LTK is None else self._weights_LTK[:, :total].transpose(0, 1)
        rows = self._format.encode(self._ids_LTK[:, :total].transpose(0, 1), weights).cpu()
        batch, at = self._runner.input_batch, 0
        for index, internal_id in enumerate(batch.req_ids):
            count = scheduler_output.num_scheduled_tokens[internal_id]
            if internal_id not in self._pieces:
                self._pieces[internal_id] = []
                prompt = tuple(self._runner.requests[internal_id].prompt_token_ids)
                self._requests_of.setdefault(prompt, []).append(internal_id)
            start = int(batch.num_computed_tokens_cpu[index])
            self._pieces[internal_id].append((start, rows[at : at + count]))
            at += count
        return result


def _is_layer_of_experts(module: torch.nn.Module) -> bool:
    return hasattr(getattr(module, "router", None), "_compute_routing")
