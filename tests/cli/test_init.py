"""``tlt init``, ``tlt models``, ``tlt tasks`` and ``tlt config --docs``."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.cli import main
from megatron_tlt.config.docs import keys, lookup, meanings
from megatron_tlt.config.shipped import shipped
from tests.helpers.launch import REPOSITORY

ROWS = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(40)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))


@pytest.mark.parametrize(
    "model, gpus, device, data",
    [
        ("qwen2.5-0.5b", "1", "L4-24GB", "chain_sum,gsm_symbolic"),
        ("qwen2.5-7b", "8", "H100-80GB", "sums.jsonl"),
        ("qwen3-30b-a3b", "4x8", "H200-141GB", "chain_sum"),
        ("llama-3.3-70b", "128", "A100-80GB", "chain_sum"),
    ],
)
def test_a_written_config_fits_according_to_plan(
    model: str, gpus: str, device: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", model, "--gpus", gpus, "--device", device, "--data", data]
    assert main(["init", *given, "--out", "mine.yaml"]) == 0
    said = capsys.readouterr().out
    assert f"put the model's Hugging Face folder at models/{model}" in said
    margin = said.partition("fits: margin ")[2].split()[0]
    assert main(["plan", "mine.yaml", "--devices", device]) == 0
    assert f"fits: margin {margin} GB" in capsys.readouterr().out  # the same figure, so the same memory plan
    text = Path("mine.yaml").read_text()
    values = yaml.safe_load(text)
    assert values["launcher"]["nnodes"] * values["launcher"]["nproc_per_node"] == eval(gpus.replace("x", "*"))
    assert "# devices per engine\n  tensor_parallel_size:" in text and text.startswith(f"# {model} on ")
    assert not list(Path().glob(".*"))  # no draft is left behind


def test_a_folder_on_a_processor_gets_a_config_without_a_recipe(tmp_path: Path) -> None:
    write_tiny_model("qwen2-tied", tmp_path / "model", max_position_embeddings=512)
    (tmp_path / "configs").mkdir()
    given = ["--model", "model", "--gpus", "0", "--data", "sums.jsonl", "--out", "configs/mine.yaml"]
    assert main(["init", *given]) == 0
    values = yaml.safe_load(Path("configs/mine.yaml").read_text())
    assert values["model"] == {"path": "../model", "recipe": None} and values["tasks"][0]["path"] == "../sums.jsonl"
    assert values["tasks"][0]["chat"] is False  # its tokenizer has no chat template
    assert main(["plan", "configs/mine.yaml"]) == 0


def test_a_terminal_is_asked_and_enter_takes_the_default(tmp_path: Path) -> None:
    main_end, its_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_tlt", "init", "--out", "mine.yaml"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=its_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.write(main_end, b"\n2\nA100-80GB\nsums.jsonl\n")
    out, error = process.communicate(timeout=60)
    os.close(main_end), os.close(its_end)
    assert process.returncode == 0, error
    assert "Model: a Hugging Face folder" in out and "Kind of GPU" in out
    values = yaml.safe_load(Path("mine.yaml").read_text())
    assert values["model"]["architecture"].endswith("qwen2.5-0.5b.json") and values["launcher"]["nproc_per_node"] == 2


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"--model": "qwen2.5-8b"}, "did you mean qwen2.5-7b"),
        ({"--gpus": "many"}, "--gpus: found 'many'; allowed: a number such as 4, or nodes x GPUs"),
        ({"--device": "H300"}, "--device: found 'H300'"),
        ({"--data": "none.jsonl"}, "--data: no file none.jsonl"),
        ({"--data": "chainsum"}, "mine.yaml: tasks[0].name: unknown dataset 'chainsum'"),
        ({"--model": "llama-3.3-70b"}, "nothing fits: llama-3.3-70b on 1 node(s) of 2 x H100-80GB"),
        ({"--response-tokens": "40000"}, "allowed: at most max_position_embeddings"),
        ({"--data": ""}, "--data: not given; allowed: data: a .jsonl"),
        ({"--out": "sums.jsonl"}, "--out: sums.jsonl exists"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    changed: dict[str, str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(Path().iterdir())
    given = {"--model": "qwen2.5-0.5b", "--gpus": "2", "--data": "chain_sum", "--out": "mine.yaml"} | changed
    assert main(["init", *(part for pair in given.items() if pair[1] for part in pair)]) == 2
    assert said in capsys.readouterr().err and sorted(Path().iterdir()) == before


def test_models_and_tasks_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["models"]) == main(["tasks"]) == main(["tasks", "number_sorting"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in shipped()) and "qwen3_moe" in out
    assert "number_sorting" in out and "gsm_symbolic" in out and "answer: " in out and "worked solution:" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["tasks", "nothing"]) == 2


def test_every_key_has_one_meaning_and_a_readable_type() -> None:
    known = list(keys())
    assert [one.key for one in known] == list(meanings()), "config/keys.yaml: a line per key, in the schema's order"
    assert not [one for one in known if not one.meaning or "<" in one.kind or "typing" in one.kind]


def test_keys_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--docs", "algorithm.clip_low"]) == 0
    assert "type: number, at least 0.0\n  default: 0.2\n" in capsys.readouterr().out
    assert [one.key for one in lookup("rollout.sampling")] == [
        f"rollout.sampling.{name}" for name in ("temperature", "top_p", "top_k")
    ]
    assert lookup("tasks.3.weight")[0].key == "tasks.weight"
    assert lookup("rollout.vllm.max_num_seqs")[0].kind == "a whole number, null"
    assert lookup("rollout.vllm.seed")[0].meaning == "managed by run.seed"
    assert main(["config", "--docs", "algorithm.clip"]) == 2
    assert "did you mean algorithm.clip_low" in capsys.readouterr().err
    assert main(["config"]) == 2 and main(["config", "quickstart-cpu", "--docs", "run"]) == 2
