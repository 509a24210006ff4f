"""Drafter training on a long-tailed batch: packed against three ways of padding, with a comparison of gradients."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_tlt.bench.packing import long_tailed_samples, plan_in_order
from megatron_tlt.bench.result import BenchmarkResult, interleave, ratio_of_medians
from megatron_tlt.config.drafter import DrafterConfig, DrafterLossConfig
from megatron_tlt.config.schema import ArchitectureConfig, RecipeConfig
from megatron_tlt.data.packing import plan_micro_batches
from megatron_tlt.drafter import DrafterTrainer, DraftModel, Entry, drafter_from_target
from megatron_tlt.drafter.eagle import Eagle
from megatron_tlt.drafter.eagle3 import Eagle3
from megatron_tlt.drafter.layers import UnrolledContext
from megatron_tlt.drafter.losses import Drafted
from megatron_tlt.drafter.model import Kind
from megatron_tlt.drafter.packing import Pack, build_pack
from megatron_tlt.models.recipe import write_untrained
from megatron_tlt.observe.environment import describe_environment

VOCAB = 128
PACKED = "packed"
WHOLE, IN_ORDER, SORTED = (
    "padded, batches in order of arrival",
    "padded, in order, by tokens",
    "padded, sorted, by tokens",
)
"""Padded to the longest of: a fixed number of neighbours; neighbours within a bound; similar lengths within a bound."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=tuple(_PADDED), default=list(_PADDED))
    parser.add_argument("--samples", type=int, default=32, help="responses in a step")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest response")
    parser.add_argument("--bounds", type=int, nargs="+", default=[1100, 4096], help="tokens per micro-batch to try")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32], help="neighbours per padded batch to try")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats")


class _PaddedContext(UnrolledContext):
    """Attention over a rectangle of B equal rows; positions right of a row's end are never visible to the row."""

    def attend(self, q_TND: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        shape, repeats = (len(self.lengths), self.lengths[0]), q_TND.shape[1] // k_TGD.shape[1]
        self.keys.append(k_TGD.repeat_interleave(repeats, dim=1).unflatten(0, shape).transpose(1, 2))
        self.values.append(v_TGD.repeat_interleave(repeats, dim=1).unflatten(0, shape).transpose(1, 2))
        q = q_TND.unflatten(0, shape).transpose(1, 2)
        if self.steps == 1:
            out = F.scaled_dot_product_attention(q, self.keys[0], self.values[0], is_causal=True)
        else:
            length, device = shape[1], q.device
            causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            own = torch.eye(length, dtype=torch.bool, device=device)
            mask = torch.cat([causal, *[own] * (self.steps - 1)], dim=1)
            out = F.scaled_dot_product_attention(q, torch.cat(self.keys, 2), torch.cat(self.values, 2), attn_mask=mask)
        return out.transpose(1, 2).flatten(0, 1)


class _PaddedStart(DraftModel):
    def start(self, hidden_TF: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, UnrolledContext]:
        return self.combine(hidden_TF.float()), _PaddedContext(lengths, hidden_TF.device)


class _PaddedEagle(_PaddedStart, Eagle):
    """EAGLE over rectangles."""


class _PaddedEagle3(_PaddedStart, Eagle3):
    """EAGLE-3 over rectangles."""


_PADDED: dict[Kind, type[DraftModel]] = {"eagle": _PaddedEagle, "eagle3": _PaddedEagle3}
"""The kinds that have a padded form here."""


class _Rectangle(Pack):
    """A padded micro-batch: the LM head runs at every position, and a mask limits the loss to drafts."""

    def rows(self, step: int) -> torch.Tensor:
        return torch.arange(len(self.anchors_T))

    def drafts(self, step: int) -> torch.Tensor:
        """1 at positions with a draft, (T)."""
        return ((self.anchors_T >= self.first_T) & (self.anchors_T + 2 + step <= self.last_T)).float()


def _rectangle(entries: Sequence[Entry], loss: DrafterLossConfig) -> _Rectangle:
    longest = max(entry.length for entry in entries)

    def padded(entry: Entry) -> Entry:
        more = longest - entry.length
        return replace(entry, token_ids=F.pad(entry.token_ids, (0, more)), hidden=F.pad(entry.hidden, (0, 0, 0, more)))

    pack = build_pack([padded(entry) for entry in entries], loss)
    ends = torch.tensor([i * longest + entry.length - 1 for i, entry in enumerate(entries)])
    return _Rectangle(**{**vars(pack), "last_T": ends.repeat_interleave(longest - 2)})


def _groups(form: str, setting: int, lengths: Sequence[int]) -> list[list[int]]:
    if form == WHOLE:
        return [list(range(i, min(i + setting, len(lengths)))) for i in range(0, len(lengths), setting)]
    return plan_in_order(lengths, setting) if form == IN_ORDER else plan_micro_batches(lengths, setting)


class _PaddedTrainer(DrafterTrainer):
    """Trains on rectangles; everything after the forming of micro-batches is the product's."""

    form, setting = WHOLE, 1

    def micro_batches(self, entries: Sequence[Entry]) -> list[tuple[Pack, list[Entry]]]:
        groups = _groups(self.form, self.setting, [entry.length for entry in entries])
        members = [[entries[i] for i in group] for group in groups]
        return [(_rectangle(group, self.config.loss), group) for group in members]

    def _accumulate(self, packs: Sequence[tuple[Pack, list[Entry]]], should_stop: Callable[[], bool]) -> torch.Tensor:
        total = self._sums()
        for pack, members in packs:
            assert isinstance(pack, _Rectangle)
            loss, sums = self._forward(pack, members)
            loss.backward()
            drafts = [float(pack.drafts(step).sum()) for step in range(self.config.steps)]
            sums[3] = sum(self.config.unroll_decay**step * count for step, count in enumerate(drafts))
            sums[4] = sum(drafts)
            total += sums
        return total

    def _drafted(
        self, pack: Pack, step: int, rows: torch.Tensor, head_input: torch.Tensor, features: torch.Tensor
    ) -> Drafted:
        assert isinstance(pack, _Rectangle)
        # positions beyond the last row's end have no target
        inside = replace(pack, anchors_T=pack.anchors_T.clamp(max=len(pack.token_ids_S) - 2 - step))
        drafted = super()._drafted(inside, step, rows, head_input, features)
        return replace(drafted, weights_R=drafted.weights_R * pack.drafts(step))


def _entries(count: int, longest: int, width: int) -> list[Entry]:
    """Long-tailed sequences with random features: the contents do not affect speed."""
    generator = torch.Generator().manual_seed(0)
    samples = long_tailed_samples(count, longest)
    return [
        Entry(
            str(i),
            0,
            samples.tokens(i).clone(),
            samples.prompt_lengths[i],
            torch.randn(samples.lengths[i], width, generator=generator).bfloat16(),
            1.0,
        )
        for i in range(samples.num_samples)
    ]


def _trainers(target: Path, kind: Kind, arguments: argparse.Namespace) -> dict[tuple[str, int], DrafterTrainer]:
    """One trainer per form and setting, with equal weights, which a step does not change."""
    model = drafter_from_target(target, kind, seed=1)
    model.from_target = False  # else the first step scales the initial weights to the data, here noise: to zero
    _fill_zeros(model)
    padded = _PADDED[kind](model.config, model.shared)
    padded.load_state_dict(model.state_dict())
    found: dict[tuple[str, int], DrafterTrainer] = {}
    for form, settings in (
        (PACKED, arguments.bounds),
        (WHOLE, arguments.batches),
        (IN_ORDER, arguments.bounds),
        (SORTED, arguments.bounds),
    ):
        for setting in settings:
            bound = setting if form == PACKED else max(arguments.bounds)
            config = DrafterConfig(
                kind=kind, optimizer="torch.optim.SGD", lr=1e-30, clip_grad=0.0, max_tokens_per_micro_batch=bound
            )
            if form == PACKED:
                found[form, setting] = DrafterTrainer(model, config, seed=0)
            else:
                trainer = _PaddedTrainer(padded, config, seed=0)
                trainer.form, trainer.setting = form, setting
                found[form, setting] = trainer
    return found


@torch.no_grad()
def _fill_zeros(model: torch.nn.Module) -> None:
    """Fills the output projections, which start at zero and would make all other gradients zero."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.02, generator=generator)


def _gradients(trainer: DrafterTrainer, entries: Sequence[Entry]) -> list[torch.Tensor]:
    trainer.train_step(entries)
    return [parameter.grad.clone() for parameter in trainer.model.parameters() if parameter.grad is not None]


def _difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative difference of a tensor: norm of the difference over norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def _positions(trainer: DrafterTrainer, entries: Sequence[Entry]) -> int:
    if isinstance(trainer, _PaddedTrainer):
        return sum(len(pack.anchors_T) for pack, _ in trainer.micro_batches(entries))
    return sum(entry.length - 2 for entry in entries)


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per kind of drafter and way of padding, each form with its best setting.

    Public drafter trainers pad batches of neighbours to their longest, and run the LM head over the padding; the target
    compares with these. The gain over micro-batches of similar lengths is smaller.
    """
    result = BenchmarkResult(environment=describe_environment(), name="drafter-packing")
    with tempfile.TemporaryDirectory() as name:
        target = Path(name)
        architecture = ArchitectureConfig(
            hidden_size=arguments.hidden_size,
            intermediate_size=3 * arguments.hidden_size,
            max_position_embeddings=arguments.longest + 64,
        )
        write_untrained(target, architecture, RecipeConfig(), VOCAB, 1)
        for kind in arguments.kinds:
            _compare(result, kind, _trainers(target, kind, arguments), arguments)
    return result


def _compare(
    result: BenchmarkResult,
    kind: Kind,
    trainers: dict[tuple[str, int], DrafterTrainer],
    arguments: argparse.Namespace,
) -> None:
    width = next(iter(trainers.values())).model.entry_size
    entries = _entries(arguments.samples, arguments.longest, width)
    gradients = {case: _gradients(trainer, entries) for case, trainer in trainers.items()}
    packed = next(gradients[case] for case in trainers if case[0] == PACKED)
    differences = {case: _difference(packed, gradients[case]) for case in trainers}
    times = interleave(
        {str(case): partial(trainer.train_step, entries) for case, trainer in trainers.items()}, arguments.repeats
    )
    best: dict[str, tuple[str, int]] = {}
    for case in sorted(trainers, key=lambda case: statistics.median(times[str(case)])):
        best.setdefault(case[0], case)
    seconds = {form: times[str(case)] for form, case in best.items()}
    positions = {form: _positions(trainers[case], entries) for form, case in best.items()}
    for form in (WHOLE, IN_ORDER, SORTED):
        result.rows.append(
            {
                "kind": kind,
                "against": form,
                "samples": len(entries),
                "tokens": sum(entry.length for entry in entries),
                "best": f"{best[form][1]}, packed {best[PACKED][1]}",
                "padded_over_packed_positions": positions[form] / positions[PACKED],
                "packed_samples_per_s": len(entries) / statistics.median(seconds[PACKED]),
                "packed_over_padded": ratio_of_medians(seconds[form], seconds[PACKED]),
                "gradient_difference": max(differences[case] for case in trainers if case[0] == form),
                "seconds": {key: value for key, value in times.items() if form in key or PACKED in key},
            }
        )
    ratio = ratio_of_medians(seconds[WHOLE], seconds[PACKED])["ratio"]
    result.target(f"packed_over_padded_samples_per_s_{kind}", ratio, ">=", 2.2)
    result.target(f"relative_difference_of_gradients_{kind}", max(differences.values()), "<=", 1e-5)
