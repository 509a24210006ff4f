"""What of a folder is compared with its manifest before its weights are used."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.checkpoint.manifest import write_manifest
from megatron_tlt.checkpoint.weights import verify_weights
from megatron_tlt.errors import RunError

MEGATRON = ("actor/metadata.json", "actor/.metadata", "actor/__0_0.distcp", "hf/config.json", "state.json")
HF = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json")
WEIGHTS = {*MEGATRON[:3], *HF[1:3]}


def folder_of(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    write_manifest(folder)
    return folder


@pytest.mark.parametrize("names", [MEGATRON, HF])
def test_changed_weights_are_refused_and_other_files_may_be_edited(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        folder = folder_of(tmp_path / name.replace("/", "-"), names)
        verify_weights(folder)
        (folder / name).write_text(f"CONTENT of {name}")
        if name in WEIGHTS:
            with pytest.raises(RunError, match=f"{folder / name}: SHA-256 differs.*damaged"):
                verify_weights(folder)
        else:
            verify_weights(folder)


def test_weights_that_the_manifest_does_not_name_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", HF)
    (folder / "extra.safetensors").write_text("x")
    with pytest.raises(RunError, match=r"extra\.safetensors: not in manifest\.json"):
        verify_weights(folder)
    folder = folder_of(tmp_path / "megatron", MEGATRON)
    (folder / "actor" / ".nfs0001").write_text("x")  # of a file that was open when it was removed
    (folder / "hf" / "chat_template.jinja").write_text("x")
    verify_weights(folder)


def test_without_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for names in (MEGATRON, HF):
        (folder_of(tmp_path / names[0].replace("/", "-"), names) / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"manifest\.json: missing: weights that cannot be verified are not used"):
        verify_weights(tmp_path / "actor-metadata.json")
    verify_weights(tmp_path / "config.json")
    assert capsys.readouterr().err.startswith(f"note: {tmp_path / 'config.json'} has no manifest.json")
