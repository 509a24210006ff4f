"""Packed and unrolled draft steps against a padded, masked computation from the definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from megatron_tlt.drafter import layers
from megatron_tlt.drafter.eagle import Eagle
from megatron_tlt.drafter.eagle3 import Eagle3
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.folder import drafter_from_target
from megatron_tlt.drafter.model import DraftModel, Kind

from .conftest import VOCAB, random_entry, scattered

STEPS = 3
KINDS: tuple[Kind, ...] = ("eagle", "eagle3")


def reference_attention(layer: layers.DraftAttention, steps: list[torch.Tensor], position: int) -> torch.Tensor:
    """The output (H) of the last step at one draft position, from the definition; steps are inputs (L, I) each.

    Input: step 0 up to the position, then this position's own input of each later step, as a plain causal sequence.
    """
    rows = torch.stack([*steps[0][: position + 1], *(later[position] for later in steps[1:])])
    q, k, v = (F.linear(rows, part.weight).unflatten(-1, (-1, layer.head_dim)) for part in parts(layer))
    angles = torch.arange(len(rows))[:, None] * layer.frequencies
    q, k = layers.rotate(q, angles), layers.rotate(k, angles)
    outputs = []
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        scores = (k[:, group] @ q[-1, head]) / layer.head_dim**0.5
        outputs.append(scores.softmax(-1) @ v[:, group])
    return F.linear(torch.cat(outputs), layer.o_proj.weight)


def parts(layer: layers.DraftAttention) -> tuple[torch.nn.Linear, ...]:
    return layer.q_proj, layer.k_proj, layer.v_proj


@pytest.mark.parametrize("chunk", [512, 4])
def test_unrolled_attention_equals_decoding(chunk: int, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_QUERY_CHUNK", chunk)
    model = scattered(drafter_from_target(target_folder, "eagle", seed=1))
    attention = model.layers[0].self_attn
    torch.manual_seed(0)
    lengths = [9, 1, 6]
    steps = [torch.randn(sum(lengths), 64) for _ in range(STEPS)]
    context = layers.UnrolledContext(lengths, torch.device("cpu"))
    found = [attention(x, context) for x in steps]
    start = 0
    for length in lengths:
        own = [x[start : start + length] for x in steps]
        for step in range(STEPS):
            for position in range(length):
                expected = reference_attention(attention, own[: step + 1], position)
                torch.testing.assert_close(found[step][start + position], expected, rtol=1e-5, atol=1e-6)
        start += length


def run(model: DraftModel, entries: list[Entry]) -> list[list[torch.Tensor]]:
    """The LM head's inputs per entry and step, computed in one pack."""
    lengths = [entry.length - 2 for entry in entries]
    tokens = [entry.token_ids.long() for entry in entries]
    features, context = model.start(torch.cat([entry.hidden[:-2, : model.feature_size] for entry in entries]), lengths)
    found = []
    for step in range(STEPS):
        inputs = torch.cat([F.pad(x, (0, step))[1 + step : len(x) - 1 + step] for x in tokens])
        head_input, features = model(inputs, features, context)
        found.append(head_input.split(lengths))
    return [list(rows) for rows in zip(*found, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_attends_across_packed_sequences(kind: Kind, target_folder: Path, target: PreTrainedModel) -> None:
    model = scattered(drafter_from_target(target_folder, kind, seed=1))
    entries = [random_entry(target, kind, length, 3, seed) for seed, length in enumerate((12, 7, 20))]
    packed = run(model, entries)
    for entry, rows in zip(entries, packed, strict=True):
        for row, alone in zip(rows, run(model, [entry])[0], strict=True):
            torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-5)
    # other neighbours in the pack change no bit
    other = run(model, [random_entry(target, kind, 12, 3, 9), entries[1], random_entry(target, kind, 20, 3, 8)])
    assert all(torch.equal(a, b) for a, b in zip(packed[1], other[1], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_nothing_before_it(kind: Kind, target_folder: Path, target: PreTrainedModel) -> None:
    model = scattered(drafter_from_target(target_folder, kind, seed=1))
    entry = random_entry(target, kind, 12, 3, 1)
    changed_ids = entry.token_ids.clone()
    changed_ids[8] = (changed_ids[8] + 1) % VOCAB
    changed = Entry("c", 0, changed_ids, 3, entry.hidden, 0.0)
    before, after = run(model, [entry])[0], run(model, [changed])[0]
    for step in range(STEPS):
        first = 8 - 1 - step  # reads token 8 in this step
        assert torch.equal(before[step][:first], after[step][:first])
        assert not torch.equal(before[step][first], after[step][first])


def test_nothing_of_the_target_is_trained_or_saved(target_folder: Path) -> None:
    for kind, model_class in (("eagle", Eagle), ("eagle3", Eagle3)):
        model = drafter_from_target(target_folder, kind, seed=1)
        assert type(model) is model_class
        own = {id(x) for x in (*model.parameters(), *model.buffers())}
        assert not own & {id(model.shared.embedding), id(model.shared.head)}
        assert {"embed_tokens.weight", "frequencies"}.isdisjoint(model.state_dict())
        assert ("lm_head.weight" in model.state_dict()) == (kind == "eagle3")
