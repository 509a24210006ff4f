"""The actor: scores responses and takes optimizer steps, under any Megatron layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_tlt.actor.batches import MicroBatch, MicroBatches, form_micro_batches, plan_shares
from megatron_tlt.actor.gradient_part import GradientPart, ShardParts
from megatron_tlt.actor.gradient_tree import own_shards
from megatron_tlt.actor.hidden_states import Holder, StateExchange
from megatron_tlt.actor.megatron_aux_layers import holders, record_hidden_states
from megatron_tlt.actor.megatron_config import parallel_sizes
from megatron_tlt.actor.megatron_lora import adapter_spans, export_adapters, export_merged
from megatron_tlt.actor.megatron_model import batch_shape, build_model
from megatron_tlt.actor.megatron_offload import PhaseOffload, gradient_buffers
from megatron_tlt.actor.megatron_optimizer import ChosenOptimizers, Judge, build_optimizer, chosen_optimizers, take_step
from megatron_tlt.actor.megatron_pass_clock import PassClock
from megatron_tlt.actor.megatron_routing import RouterReplays
from megatron_tlt.actor.megatron_schedule import AfterForward, run_passes
from megatron_tlt.actor.megatron_strict import StrictGradients
from megatron_tlt.actor.megatron_weights import export_weights, held_spans
from megatron_tlt.actor.scores import PolicyScores, ScoredTokens, assemble_scores, logit_scores
from megatron_tlt.algorithms.losses import Loss
from megatron_tlt.config.optimizer import LrScheduleConfig
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.config.speeds import slowest_of
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import current_device
from megatron_tlt.reshard.spans import Span
from megatron_tlt.reshard.views import ViewCache


class Policy:
    """A Megatron-Core model with its optimizer; every rank of the world holds its shard and calls every method.

    Args:
        model_folder: Hugging Face folder with the initial weights.
        actor: layout, pass-through options, micro-batch bounds.
        seed: of Megatron's RNG trackers.
        total_steps: number of updates of the learning rate's schedule.
        lr_schedule: that of ``actor.lr_schedule`` if None.
        trainable: False builds a frozen reference without gradients or optimizer.
        verify: compare the weights with the folder's manifest first.
        logical_shards: division of each batch, of which data-parallel ranks have equal parts: scores and updates have
            the same bits for every pipeline and power-of-two data-parallel size. None divides it among the ranks.
        speeds: relative ones of all ranks, by which shares are divided; None: evenly.

    Raises:
        ConfigError: invalid model, layout or optimizer.
    """

    def __init__(
        self,
        model_folder: Path,
        actor: ActorConfig,
        seed: int,
        *,
        total_steps: int = 1,
        lr_schedule: LrScheduleConfig | None = None,
        trainable: bool = True,
        verify: bool = True,
        logical_shards: int | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self._actor = actor
        self._device = current_device().torch_device
        chosen = chosen_optimizers(actor) if trainable else ChosenOptimizers(None)
        sharded = not chosen.of_whole_tensors
        self.model = build_model(
            model_folder, actor, seed, trainable=trainable, verify=verify, distributed_optimizer=sharded
        )
        self.speeds = None if speeds is None else slowest_of(all_gather_data(self.replica, int), speeds)
        """Of the data-parallel ranks: the slowest rank's of each."""
        self.optimizer: Any = None
        self.scheduler: Any = None
        if trainable:
            schedule = lr_schedule or actor.lr_schedule
            self.optimizer, self.scheduler = build_optimizer(
                self.model, actor, chosen, total_steps=total_steps, lr_schedule=schedule
            )
        self._logical_shards = logical_shards
        self._batch_shape = batch_shape(self.model, actor)
        self._strict = StrictGradients(self.model, logical_shards) if trainable and logical_shards else None
        self._routing = RouterReplays(self.model.chunks, self.model.config)
        self._part: GradientPart | None = None  # what the next update's gradient has already
        self._holders: dict[tuple[int, ...], list[Holder]] = {}
        self.agreement: float | None = None
        """Of the last pass: the share of (token, layer) whose experts the routers would have chosen too."""
        self.memory = PhaseOffload(self.model, self.optimizer)
        """Offloads this policy between its phases."""
        self.lora = actor.lora if trainable else None
        self._views = ViewCache[tuple[Span, torch.Tensor]](self.model.chunks)
        self._adapter_views = ViewCache[tuple[Span, torch.Tensor]](self.model.chunks)
        self.on_forward: Callable[[int], None] = lambda responses: None
        """Called with the number of responses of each micro-batch that passes through this rank."""
        self.clock = PassClock()
        """Of this rank's own passes."""

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the parallel dimensions."""
        return parallel_sizes()

    @property
    def replica(self) -> int:
        """The data-parallel rank of this rank, which all ranks of one copy of the weights share."""
        return int(parallel_state.get_data_parallel_rank())

    def _groups(self, lengths: Sequence[int], alone: bool = False) -> list[list[int]]:
        """This data-parallel rank's micro-batches, as indices into ``lengths``; with ``alone`` it takes all samples."""
        return [group for groups in self._groups_by_shard(lengths, alone) for group in groups]

    def _groups_by_shard(self, lengths: Sequence[int], alone: bool = False) -> list[list[list[int]]]:
        ranks, rank = (1, 0) if alone else (parallel_state.get_data_parallel_world_size(), self.replica)
        own = range(rank, rank + 1) if self._logical_shards is None else own_shards(self._logical_shards, ranks, rank)
        shares = self._logical_shards or ranks
        return plan_shares(lengths, self._batch_shape, shares, None if alone else self.speeds)[own.start : own.stop]

    def share(self, lengths: Sequence[int]) -> list[int]:
        """The samples of a batch that this rank computes on, ascending; equal on all ranks of a data-parallel rank.

        ``lengths`` are the numbers of tokens of all samples, prompt and response. Depends on layout and speeds alone.

        Raises:
            ConfigError: a sample is longer than a micro-batch may be.
        """
        return sorted(i for group in self._groups(lengths) for i in group)

    def micro_batches(self, batch: RolloutBatch, alone: bool = False) -> MicroBatches:
        """This data-parallel rank's micro-batches; ``batch`` must hold :meth:`share` or, ``alone``, all samples."""
        return form_micro_batches(batch, self._groups(batch.lengths, alone), self._batch_shape, self._device)

    def _scores(
        self, logits_RTV: torch.Tensor, batch: MicroBatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vocab, chunk = self.model.hf_config.vocab_size, self._actor.log_prob_chunk_tokens
        return logit_scores(logits_RTV, batch, temperature, vocab_size=vocab, chunk_tokens=chunk)

    def run_schedule(self, batches: MicroBatches, after_forward: AfterForward, *, forward_only: bool) -> list[Any]:
        """Runs micro-batches through Megatron's schedule; returns the results of ``after_forward`` on the last stage.

        ``after_forward`` receives a micro-batch and this rank's share of its logits, (R, T/C, V/TP).
        """

        def began(batch: MicroBatch) -> None:
            self.on_forward(len(batch.indices))
            self.clock.add_tokens(batch.tokens_RT.numel(), training=not forward_only)

        with self.clock.running(self.model.config, training=not forward_only):
            return run_passes(self.model, self._routing, batches, began, after_forward, forward_only=forward_only)

    def synchronize_parameters(self) -> None:
        """Gathers updated parameters that Megatron defers to the next forward pass (``ddp.overlap_param_gather``)."""
        if self.optimizer is not None and self.model.ddp_chunks[0].ddp_config.overlap_param_gather:
            for chunk in self.model.ddp_chunks:
                chunk.start_param_sync(force_sync=True)

    @torch.no_grad()
    def log_probs(self, batch: RolloutBatch, temperature: float = 1.0, *, alone: bool = False) -> PolicyScores:
        """Scores every response token of this rank's :meth:`share` of ``batch``; a collective over the world.

        With ``alone`` the ranks of one data-parallel rank score all samples, and no other rank takes part.
        """
        return self._score(batch, self.micro_batches(batch, alone), temperature)

    @torch.no_grad()
    def log_probs_and_states(
        self,
        batch: RolloutBatch,
        temperature: float = 1.0,
        *,
        aux_layers: Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        alone: bool = False,
    ) -> tuple[PolicyScores, dict[int, torch.Tensor]]:
        """The result of :meth:`log_probs`, bit for bit, and the hidden states of the same pass for drafter training.

        Args:
            batch: must hold this rank's share.
            temperature: of the log-probs.
            aux_layers: layers i whose input is recorded, before any norm: transformers' ``hidden_states[i]`` for i
                below the number of layers, the stream before the final norm for i equal to it. EAGLE has none.
            dtype: of the states.
            alone: as in :meth:`log_probs`.

        Returns:
            The scores of the share, and the states of some of its samples, by index, on the host. A sample of T tokens
            has (T, (k + 1) * H) states: k auxiliary layers in the order given, then the output of the final norm,
            which is the LM head's input. Exactly one rank of the world has the states of a sample; the samples of a
            data-parallel rank are divided over its model-parallel ranks by tokens. The last row is zeros: the last
            token has no label, so the pass leaves it out, and drafter training and evaluation do not read it.

        Raises:
            ConfigError: the model has no such layer.
        """
        batches = self.micro_batches(batch, alone)
        with record_hidden_states(self.model, aux_layers, dtype) as aux_states:
            scores = self._score(batch, batches, temperature)
        exchange = StateExchange(
            batches,
            batch.lengths,
            aux_states,
            self.state_holders(aux_layers),
            num_columns=len(aux_layers) + 1,
            hidden_size=self.model.config.hidden_size,
            dtype=dtype,
        )
        return scores, exchange.run()

    def state_holders(self, aux_layers: Sequence[int]) -> list[Holder]:
        """The ranks that record the states of this rank's samples; the first time a collective over the world."""
        if (key := tuple(aux_layers)) not in self._holders:
            self._holders[key] = holders(self.model, key)
        return self._holders[key]

    def _score(self, samples: RolloutBatch, batches: MicroBatches, temperature: float) -> PolicyScores:
        """One pass over this data-parallel rank's micro-batches."""
        self.synchronize_parameters()
        for chunk in self.model.ddp_chunks:
            chunk.eval()

        def collect(batch: MicroBatch, logits: torch.Tensor, non_loss_data: bool = True) -> ScoredTokens:
            log_probs, entropy = self._scores(logits, batch, temperature)
            return batch.indices, batch.response_values(log_probs).cpu(), batch.response_values(entropy).cpu()

        collected = self.run_schedule(batches, collect, forward_only=True)
        self.agreement = self._routing.end()
        for chunk in self.model.ddp_chunks:
            chunk.train()
        return assemble_scores(samples, (i for group in batches.groups for i in group), collected or [])

    def _held_tokens(self, batch: MicroBatch) -> int:
        """Tokens of a micro-batch that one rank's layers process, padding included."""
        sequence = self._batch_shape.sequence_parallel_size
        return batch.tokens_RT.numel() // (sequence * parallel_state.get_context_parallel_world_size())

    def accumulate(self, samples: RolloutBatch, loss: Loss, temperature: float = 1.0) -> None:
        """Adds the gradient of ``samples`` to that of the next :meth:`update`, which trains on others.

        The ranks of one data-parallel rank call it together, with the samples that they hold all; no other rank takes
        part. Until that update no memory of the policy may be offloaded.
        """
        batches = self.micro_batches(samples, alone=True)
        if self._part is None:
            self._zero_gradients()
            self._part = GradientPart(self._device)
        part = self._part
        part.add(self._sizes(batches, loss))
        with self.model.unfinished_gradients():
            self.run_schedule(batches, self._loss_of(loss, temperature, part), forward_only=False)

    def _sizes(self, batches: MicroBatches, loss: Loss) -> torch.Tensor:
        """Tokens in this rank's layers, and the denominator of the loss; (2) float64."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch in batches:
            totals[0] += self._held_tokens(batch)
            totals[1] += loss.denominator(batch.loss_inputs)
        return totals

    def _loss_of(
        self, loss: Loss, temperature: float, part: GradientPart, scale: torch.Tensor | float = 1.0, earlier: int = 0
    ) -> AfterForward:
        """The loss of a micro-batch, times ``scale``, for Megatron's schedule; its metrics are added to ``part``.

        ``earlier``: tokens in the layers that were accumulated before, which the first micro-batch counts with its own.
        """
        # Context-parallel ranks compute the same loss on the same samples, so only one of them counts.
        counts = parallel_state.get_context_parallel_rank() == 0
        uncounted = [earlier]

        def compute(batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            log_probs, entropy = self._scores(logits, batch, temperature)
            total, metrics = loss(log_probs, entropy, batch.loss_inputs)
            part.loss = part.loss + total.detach()
            part.add_metrics(batch.loss_inputs.mask_BT.sum(), metrics)
            more = uncounted.pop() if uncounted else 0
            tokens = torch.tensor(self._held_tokens(batch) + more, dtype=torch.int, device=self._device)
            return total * scale, tokens * counts, {}

        return compute

    def _zero_gradients(self) -> None:
        for chunk in self.model.ddp_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(
        self,
        samples: RolloutBatch,
        loss: Loss,
        temperature: float = 1.0,
        judge: Judge | None = None,
    ) -> dict[str, float]:
        """One optimizer step on all ``samples``, of which every rank holds its :meth:`share`, and accumulated ones.

        Megatron divides the whole gradient by the tokens in the layers; the loss is multiplied by them and divided by
        its denominator. A router adds the gradient of its auxiliary losses, which are means over a micro-batch, times
        this rank's tokens. Divided by all tokens, the result is a mean over tokens for every layout and number of
        micro-batches, and does not depend on the denominator of the loss.

        ``judge`` gets the gradient's norm and the loss of the batch, the same on every rank. False leaves weights,
        optimizer and learning rate as they are. Without it whatever is finite is applied.

        Returns:
            Means over response tokens of the loss's metrics; the number of ``tokens``; ``grad_norm`` before clipping;
            ``lr``; and ``router_agreement`` where the samples have routes. The same on every rank.

        Raises:
            RunError: without ``judge``, the gradient is not finite; or a metric is not one number.
        """
        backward = self._backward if self._strict is None else self._backward_by_shard
        part, denominator = backward(samples, loss, temperature)
        self.agreement = self._routing.end()
        lr = self.optimizer.param_groups[0]["lr"]
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        mean = value = partial(part.loss_of_all_ranks, denominator, counts=first)
        if self._actor.optimizer_loss != "policy":
            value = partial(torch.sub, 1.0, samples.rewards_N.mean().float().to(self._device))
        norm = (self._strict.norm,) if self._strict is not None else ()
        grad_norm, applied = take_step(self.optimizer, value, mean, judge, *norm)
        self.scheduler.step(1 if applied else 0)
        found = part.means_of_all_ranks(counts=first) | {"grad_norm": grad_norm, "lr": float(lr)}
        return found if self.agreement is None else {**found, "router_agreement": self.agreement}

    def _backward(self, samples: RolloutBatch, loss: Loss, temperature: float) -> tuple[GradientPart, torch.Tensor]:
        """Leaves the gradient of the update in the optimizer's buffers; also the denominator of the loss."""
        batches = self.micro_batches(samples)
        part, self._part = self._part or GradientPart(self._device), None
        earlier = int(part.sizes[0])
        part.add(self._sizes(batches, loss))
        totals = part.sizes.clone()
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        tokens, denominator = totals
        scale = (tokens / denominator.clamp(min=1)).float()
        if earlier:
            for gradients in gradient_buffers(self.model.ddp_chunks):
                gradients *= scale
        else:
            self._zero_gradients()
        self.run_schedule(batches, self._loss_of(loss, temperature, part, scale, earlier), forward_only=False)
        return part, denominator

    def _backward_by_shard(
        self, samples: RolloutBatch, loss: Loss, temperature: float
    ) -> tuple[ShardParts, torch.Tensor]:
        """As :meth:`_backward`, one logical shard after another; Megatron reduces and divides nothing."""
        assert self._strict is not None

        def run(batches: MicroBatches, part: GradientPart, scale: torch.Tensor) -> None:
            self._zero_gradients()
            self.run_schedule(batches, self._loss_of(loss, temperature, part, scale), forward_only=False)

        groups, shape = self._groups_by_shard(samples.lengths), self._batch_shape
        shards = [form_micro_batches(samples, own, shape, self._device) for own in groups]
        return self._strict.backward(shards, partial(self._sizes, loss=loss), run)

    def held_spans(self) -> list[tuple[Span, torch.Tensor]]:
        """This rank's spans of every Hugging Face tensor, with views of the data; a collective. Without adapters."""
        self.synchronize_parameters()
        return self._views.get(lambda: held_spans(self.model.weights, self.model.chunks))

    def export_weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every full weight (or those of ``names``) under its Hugging Face name, with what adapters add.

        A collective: all ranks must exhaust the iterator.
        """
        self.synchronize_parameters()
        if self.lora is None:
            return export_weights(self.model.weights, self.model.chunks, names)
        return export_merged(self.model.weights, self.model.chunks, self.lora, names)

    def adapter_spans(self) -> list[tuple[Span, torch.Tensor]]:
        """As :meth:`held_spans`, of the adapters' tensors; empty without ``actor.lora``."""
        self.synchronize_parameters()
        return self._adapter_views.get(lambda: adapter_spans(self.model.chunks))

    def export_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every full tensor of the adapters on every rank; a collective.

        Raises:
            RunError: the policy has no adapters.
        """
        if self.lora is None:
            raise RunError("the policy has no adapters; allowed: a trainable policy with actor.lora")
        self.synchronize_parameters()
        return export_adapters(self.model.weights, self.model.chunks, self.lora)
