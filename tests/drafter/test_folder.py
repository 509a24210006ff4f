"""Drafter folders: vLLM loads them and drafts the same tokens as our model; folders that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tlt.bench.tiny_models import TINY_MODELS, write_tiny_model
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.drafter.evaluation import greedy_chains
from megatron_tlt.drafter.folder import (
    aux_layers_of,
    default_aux_layers,
    draft_config,
    drafter_from_target,
    first_drafter,
    load_drafter,
    save_drafter,
)
from megatron_tlt.drafter.model import Kind, SharedWeights
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf_folder import read_hf_config
from tests.helpers.launch import run_python

from .conftest import AUX_LAYERS, VOCAB, hidden_states, load_target, scattered, write_target

WORKER = Path(__file__).parent / "workers" / "vllm_drafts.py"
KINDS: tuple[Kind, ...] = ("eagle", "eagle3")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "name"),
    [("eagle", "qwen2-tied"), ("eagle3", "llama-llama3-tied"), ("eagle", "llama-linear"), ("eagle3", "qwen3-tied")],
)
def test_vllm_drafts_what_our_model_drafts(kind: Kind, name: str, tmp_path: Path) -> None:
    target_folder = write_target(name, tmp_path / "target")
    model = scattered(drafter_from_target(target_folder, kind, seed=3))
    save_drafter(model, tmp_path / "drafter")
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (5, 19, 40)]
    out = tmp_path / "out.json"
    run_python(
        WORKER, [str(target_folder), str(tmp_path / "drafter"), kind, json.dumps(prompts), str(out)], timeout_s=300
    )
    found = json.loads(out.read_text())

    assert [row["response"] for row in found["drafted"]] == [row["response"] for row in found["plain"]]
    target = load_target(target_folder)
    compared, distinct = 0, set()
    for row in found["drafted"]:
        tokens = torch.tensor(row["prompt"] + row["response"])
        hidden = hidden_states(target, tokens, kind)[:, : model.feature_size]
        chains = greedy_chains(model, tokens[1:], hidden[:-1], [len(tokens) - 1], depth=2)
        for record in row["records"]:
            # after the end of the response vLLM drafts from tokens that are cut off later
            if record["position"] + 1 < len(tokens):
                assert record["next"] == tokens[record["position"] + 1]
                assert record["drafts"] == chains[record["position"]].tolist(), (record, row)
                compared += 1
                distinct.add(tuple(record["drafts"]))
    assert compared >= 30
    assert len(distinct) >= 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_family_starts_from_its_last_layer_and_reloads(name: str, kind: Kind, tmp_path: Path) -> None:
    target = write_tiny_model(name, tmp_path / "target", num_hidden_layers=3)
    random_state = torch.get_rng_state()
    model = drafter_from_target(target, kind, seed=1)
    assert torch.equal(torch.get_rng_state(), random_state)
    again = drafter_from_target(target, kind, seed=1).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())
    save_drafter(model, tmp_path / "drafter")
    saved = load_file(tmp_path / "drafter" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert not [key for key in saved if "embed_tokens" in key or (kind == "eagle" and "lm_head" in key)]

    shared = SharedWeights.from_folder(target)
    loaded = load_drafter(tmp_path / "drafter", read_hf_config(target), kind, shared)
    assert all(torch.equal(tensor, saved[key]) for key, tensor in loaded.state_dict().items())
    assert loaded.config.to_dict() == model.config.to_dict()
    last = load_file(target / "model.safetensors")
    at = "midlayer" if kind == "eagle3" else "layers.0"
    query = saved[f"{at}.self_attn.q_proj.weight"][:, -64:]
    assert torch.equal(query, last["model.layers.2.self_attn.q_proj.weight"])
    assert shared.head is shared.embedding or not torch.equal(shared.head, shared.embedding)


def test_a_config_starts_from_its_folder_or_from_the_target(target_folder: Path, tmp_path: Path) -> None:
    fresh = first_drafter(DrafterConfig(kind="eagle3", aux_hidden_state_layer_ids=[0, 2, 4]), target_folder, seed=1)
    assert aux_layers_of(fresh.config) == (0, 2, 4)
    save_drafter(scattered(fresh), tmp_path, torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    config = DrafterConfig(kind="eagle3", path=tmp_path)
    loaded = first_drafter(config, target_folder, seed=1)
    assert aux_layers_of(loaded.config) == (0, 2, 4)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name
    with pytest.raises(
        ConfigError, match=r"drafter.aux_hidden_state_layer_ids is \[1, 2, 3\]; .* was made for \[0, 2, 4\]"
    ):
        first_drafter(config.model_copy(update={"aux_hidden_state_layer_ids": [1, 2, 3]}), target_folder, seed=1)
    with pytest.raises(ConfigError, match=r"the target's embedding is \(64, 32\); the drafter asks for \(64, 64\)"):
        loaded.share(SharedWeights(torch.zeros(64, 32), torch.zeros(64, 32)))


def changed(folder: Path, **options: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_of_another_size_is_refused_with_both_sizes(kind: Kind, target_folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model("qwen2-untied", tmp_path / "other", num_hidden_layers=4, hidden_size=128)
    save_drafter(drafter_from_target(other, kind, seed=1), tmp_path / "drafter")
    with pytest.raises(ConfigError, match="hidden_size is 128; the target asks for 64"):
        load_drafter(
            tmp_path / "drafter", read_hf_config(target_folder), kind, SharedWeights.from_folder(target_folder)
        )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("vocab_size", 32, "vocab_size is 32; the target asks for 64"),
        ("draft_vocab_size", 65, "draft_vocab_size is 65; allowed: at most the target's vocabulary, 64"),
        ("draft_vocab_size", 32, "no tensor 'd2t'"),
        ("attention_bias", True, "attention_bias is True; allowed: false"),
        ("norm_before_residual", True, "norm_before_residual is True; allowed: false"),
        ("architectures", ["LlamaForCausalLM"], "architectures is .*'LlamaForCausalLM'.*LlamaForCausalLMEagle3"),
        ("eagle_aux_hidden_state_layer_ids", [1, 2, 9], r"\[1, 2, 9\], but in eagle_config \[1, 2, 3\]; allowed"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "but in eagle_config"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 7.0, "factor": 2.0}, "rope_type is 'yarn'; allowed"),
        ("intermediate_size", 96, r"midlayer.mlp.gate_proj.weight' has shape \(128, 64\); allowed: \(96, 64\)"),
    ],
)
def test_options_that_do_not_fit_the_target_are_refused(
    option: str, value: Any, message: str, target_folder: Path, tmp_path: Path
) -> None:
    save_drafter(drafter_from_target(target_folder, "eagle3", seed=1), tmp_path)
    changed(tmp_path, **{option: value})
    with pytest.raises(ConfigError, match=message):
        load_drafter(tmp_path, read_hf_config(target_folder), "eagle3", SharedWeights.from_folder(target_folder))


def test_a_folder_as_published_loads_and_drafts(tmp_path: Path) -> None:
    """A Llama 3.1 head: float16, with embedding and both vocabulary tables, no layer ids, plain rotary positions."""
    target = write_target("llama-llama3-tied", tmp_path / "target")
    model = scattered(drafter_from_target(target, "eagle3", seed=1, draft_vocab_size=16))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(0, VOCAB, VOCAB // 16)[:16]
    weights["d2t"] = ids - torch.arange(16)
    published = {name: t.half() if t.is_floating_point() else t for name, t in weights.items()}
    published["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    published["embed_tokens.weight"] = torch.zeros(VOCAB, model.config.hidden_size, dtype=torch.float16)
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(published, folder / "model.safetensors")
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    own = {key: getattr(model.config, key) for key in keys}
    own |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    own |= {"max_position_embeddings": 2048, "vocab_size": VOCAB, "draft_vocab_size": 16, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(own | {"tie_word_embeddings": False, "pad_token_id": 0}))

    config = read_hf_config(target)
    loaded = load_drafter(folder, config, "eagle3", SharedWeights.from_folder(target))
    assert loaded.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert aux_layers_of(loaded.config) == default_aux_layers(config.num_hidden_layers)
    assert torch.equal(loaded.draft_ids_D, ids)
    save_drafter(loaded, tmp_path / "ours")
    again = load_drafter(tmp_path / "ours", config, "eagle3", loaded.shared)
    tokens = torch.arange(12)
    hidden = hidden_states(load_target(target), tokens, "eagle3")[:, : model.feature_size]
    chains = greedy_chains(loaded, tokens[1:], hidden[:-1], [11], depth=3)
    assert torch.equal(chains, greedy_chains(again, tokens[1:], hidden[:-1], [11], depth=3))
    assert set(chains.flatten().tolist()) <= set(ids.tolist())


def test_a_missing_tensor_and_a_missing_folder_are_named(target_folder: Path, tmp_path: Path) -> None:
    config, shared = read_hf_config(target_folder), SharedWeights.from_folder(target_folder)
    save_drafter(drafter_from_target(target_folder, "eagle", seed=1), tmp_path)
    with pytest.raises(ConfigError, match="architectures"):
        load_drafter(tmp_path, config, "eagle3", shared)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_drafter(tmp_path / "nowhere", config, "eagle", shared)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor 'layers\.0\.mlp\.up_proj\.weight'"):
        load_drafter(tmp_path, config, "eagle", shared)


def test_aux_layers(target_folder: Path) -> None:
    assert [default_aux_layers(n) for n in (64, 28, 6, 4, 3, 2)] == [
        (2, 32, 61),
        (2, 14, 25),
        (1, 3, 5),
        AUX_LAYERS,
        (0, 1, 2),
        (0, 1, 2),
    ]
    for aux_layers in ((1, 1, 2), (3, 2, 1), (1, 2), (1, 2, 5)):
        with pytest.raises(ConfigError, match="EAGLE-3 reads layers"):
            draft_config(read_hf_config(target_folder), "eagle3", aux_layers)
    with pytest.raises(ConfigError, match="the target has 1 layers"):
        default_aux_layers(1)
