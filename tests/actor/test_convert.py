"""Hugging Face to Megatron and back, by other numbers of processes, bit for bit; nothing half written looks whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.checkpoint.manifest import verify_manifest
from tests.helpers.launch import REPOSITORY, python, run_logged, run_python

pytestmark = pytest.mark.distributed
TOOL = REPOSITORY / "tools" / "convert_checkpoint.py"
WORKER = Path(__file__).parent / "workers" / "converted.py"


def convert(*arguments: object, expect_status: int = 0, fresh: bool = False) -> str:
    command = [python(fresh), str(TOOL), *map(str, arguments)]
    return run_logged(command, timeout_s=180, expect_status=expect_status)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


@pytest.mark.parametrize(("name", "there", "back"), [("qwen2-tied", 1, 2), ("qwen3-moe", 2, 1)])
def test_round_trip_is_bit_equal_and_carries_the_small_files(name: str, there: int, back: int, tmp_path: Path) -> None:
    source = write_tiny_model(name, tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    file = source / "model.safetensors"
    stored = load_file(file)
    some = next(n for n in stored if "gate" in n)
    stored[some][0, 0] = -0.0
    save_file({n: tensor.bfloat16() for n, tensor in stored.items()}, file, metadata={"format": "pt"})

    convert(source, tmp_path / "megatron", "--processes", there)
    assert verify_manifest(tmp_path / "megatron") == []
    convert(tmp_path / "megatron", tmp_path / "back", "--processes", back)
    assert same_bits(weights_of(source), weights_of(tmp_path / "back"))
    for beside in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / beside).read_text() == (source / beside).read_text()
    index = tmp_path / "back" / "model.safetensors.index.json"
    if index.is_file():
        named = json.loads(index.read_text())["weight_map"]
        assert {n: (tmp_path / "back" / f).is_file() for n, f in named.items()} == dict.fromkeys(stored, True)


@pytest.mark.parametrize("name", ["llama-llama3-tied", "mixtral"])
def test_megatron_loads_what_was_converted_and_a_policys_checkpoint_converts_back(name: str, tmp_path: Path) -> None:
    source = write_tiny_model(name, tmp_path / "hf")
    convert(source, tmp_path / "megatron")
    run_python(WORKER, [str(tmp_path / "megatron"), str(tmp_path / "saved")])
    convert(tmp_path / "saved", tmp_path / "back", "--side-files", source)
    assert same_bits(weights_of(source), weights_of(tmp_path / "back"))


def test_interrupted_it_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    source = write_tiny_model("qwen2-untied", tmp_path / "hf", hidden_size=512, intermediate_size=8192, vocab_size=4096)
    command = [sys.executable, str(TOOL), str(source), str(tmp_path / "out" / "megatron")]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/.megatron.tmp*/actor/*.distcp")):
        assert process.poll() is None and time.monotonic() < deadline, "it was over before it could be interrupted"
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "megatron").exists()
    convert(source, tmp_path / "out" / "megatron")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["megatron"]
    assert verify_manifest(tmp_path / "out" / "megatron") == []


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path: Path) -> None:
    source = write_tiny_model("qwen2-tied", tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    assert "neither a Hugging Face folder" in convert(tmp_path / "empty", tmp_path / "out", expect_status=2)
    assert "exists already" in convert(source, tmp_path / "empty", expect_status=2)
    file = source / "model.safetensors"
    stored = load_file(file)
    stored["model.embed_tokens.weight"] = torch.zeros(3, 64)
    save_file(stored, file)
    log = convert(source, tmp_path / "out", expect_status=2)
    (line,) = (line for line in log.splitlines() if not line.startswith("note: "))
    assert line.startswith("error: ")
    assert "tensor 'model.embed_tokens.weight' has shape (3, 64); config.json asks for (64, 64)" in line
    assert not (tmp_path / "out").exists()


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 64
    file.write_bytes(data)


def test_damaged_or_unverifiable_weights_are_neither_converted_nor_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_model("qwen2-tied", tmp_path / "hf")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    assert f"note: {source} has no manifest.json" in convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert verify_manifest(tmp_path / "back") == []

    (data,) = (tmp_path / "megatron" / "actor").glob("*.distcp")
    flip_a_bit(data)
    flip_a_bit(tmp_path / "back" / "model.safetensors")
    for name, file in (("megatron", data), ("back", tmp_path / "back" / "model.safetensors")):
        log = convert(tmp_path / name, tmp_path / "out", expect_status=1)
        assert f"{file}: SHA-256 differs from the manifest's" in log and not (tmp_path / "out").exists()
        log = run_python(WORKER, [str(tmp_path / name), str(tmp_path / "saved")], expect_status=None)
        assert f"{file}: SHA-256 differs from the manifest's" in log and not (tmp_path / "saved").exists()
    log = convert(tmp_path / "back", tmp_path / "taken", "--no-verify")
    assert "not verified (--no-verify)" in log and verify_manifest(tmp_path / "taken") == []

    (tmp_path / "megatron" / "manifest.json").unlink()
    log = convert(tmp_path / "megatron", tmp_path / "out", expect_status=1)
    assert "manifest.json: missing" in log and "not used unless verification is switched off" in log
    assert not list((tmp_path / "tmp").glob("tlt-convert-*"))  # no log of a conversion or of a wrong try is left
