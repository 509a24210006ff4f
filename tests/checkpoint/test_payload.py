"""The file of a training state: read back whole, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_tlt.checkpoint.payload import STATE, Payload, read_payload, write_payload
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.files import atomic_file
from tests.helpers.limits import files_of_at_most

PAYLOAD = Payload("k.v1", {"version": 3, "numbers": {"/lr": 0.1}}, {"a": torch.arange(50_000.0), "b": torch.ones(())})


def test_it_comes_back_and_outlives_its_file(tmp_path: Path) -> None:
    file = tmp_path / STATE
    write_payload(file, PAYLOAD)
    found = read_payload(file, "k.v1")
    file.write_bytes(b"\0" * file.stat().st_size)
    assert (found.kind, found.header) == (PAYLOAD.kind, PAYLOAD.header)
    assert all(found.tensors[name].equal(tensor) for name, tensor in PAYLOAD.tensors.items())


def test_what_is_not_such_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / STATE
    with pytest.raises(ConfigError, match=rf"{STATE}: cannot be read"):
        read_payload(file, "k.v1")
    write_payload(file, PAYLOAD)
    with pytest.raises(ConfigError, match=r"its format is 'k\.v1'; allowed: 'k\.v2'"):
        read_payload(file, "k.v2")
    for length in (0, 7, 200, file.stat().st_size - 1):
        cut = tmp_path / f"cut{length}"
        cut.write_bytes(file.read_bytes()[:length])
        with pytest.raises(ConfigError, match=f"cut{length}: cannot be read"):
            read_payload(cut, "k.v1")
    save_file({"a": torch.ones(1)}, tmp_path / "plain")
    with pytest.raises(ConfigError, match="its format is None"):
        read_payload(tmp_path / "plain", "k.v1")
    save_file({"a": torch.ones(1)}, tmp_path / "headless", metadata={"format": "k.v1"})
    with pytest.raises(ConfigError, match="headless: cannot be read: KeyError"):
        read_payload(tmp_path / "headless", "k.v1")


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path: Path) -> None:
    file = tmp_path / STATE
    write_payload(file, PAYLOAD)
    with (
        files_of_at_most(100_000),
        pytest.raises(RunError, match=rf"cannot write .*/{STATE}: .*File too large"),
        atomic_file(file) as temporary,
    ):
        write_payload(temporary, Payload("k.v1", {}, {"other": torch.zeros(50_000)}))
    assert [path.name for path in tmp_path.iterdir()] == [STATE]
    assert read_payload(file, "k.v1").header == PAYLOAD.header
