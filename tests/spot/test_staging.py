"""Staging memory: bit-exact for every dtype, and reused for tensors of the same shapes."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_tlt.checkpoint.payload import STATE, Payload, read_payload, write_payload
from megatron_tlt.spot.staging import StagingBuffer

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bit patterns, including NaN payloads, infinities and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.tensor(shape).prod()) * torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@settings(max_examples=40)
@given(
    drawn=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=0, max_size=6)
)
def test_every_bit_survives_memory_and_file(
    tmp_path_factory,
    drawn: list[tuple[torch.dtype, list[int]]],  # type: ignore[no-untyped-def]
) -> None:
    tensors = {f"t{i}/x": random_bits(dtype, tuple(shape), i) for i, (dtype, shape) in enumerate(drawn)}
    buffer = StagingBuffer()
    buffer.copy_from(tensors)
    buffer.wait()
    file = tmp_path_factory.mktemp("s") / STATE
    write_payload(file, Payload("k", {"n": [1.5, True, None]}, buffer.tensors))
    found = read_payload(file, "k")
    assert found.header == {"n": [1.5, True, None]}
    for read in (buffer.tensors, found.tensors, load_file(file)):
        assert {name: bits(tensor) for name, tensor in read.items()} == {n: bits(t) for n, t in tensors.items()}
    assert buffer.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_the_memory_is_kept_until_tensors_do_not_fit() -> None:
    buffer = StagingBuffer()
    buffer.copy_from({"a": torch.ones(100), "b": torch.zeros(3, 4)})
    first = buffer.tensors["a"].data_ptr()
    buffer.copy_from({"a": torch.full((100,), 2.0), "b": torch.ones(3, 4)})
    assert buffer.tensors["a"].data_ptr() == first and float(buffer.tensors["a"].sum()) == 200
    buffer.copy_from({"c": torch.ones(50, dtype=torch.int64)})  # other tensors that fit
    assert buffer.tensors["c"].data_ptr() == first and list(buffer.tensors) == ["c"]
    buffer.copy_from({"c": torch.ones(10_000)})
    assert float(buffer.tensors["c"].sum()) == 10_000


def test_non_contiguous_and_trainable_tensors_are_copied() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    buffer = StagingBuffer()
    buffer.copy_from({"p": parameter, "t": parameter.detach().t(), "same": parameter.detach()})
    assert not buffer.tensors["p"].requires_grad
    with torch.no_grad():
        parameter.zero_()
    assert buffer.tensors["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert buffer.tensors["p"].equal(buffer.tensors["same"])


def test_a_file_takes_no_second_copy_of_the_tensors(tmp_path: Path) -> None:
    """Peak memory while 64 MiB are written, as the kernel counts it."""
    buffer = StagingBuffer()
    buffer.copy_from({"a": torch.ones(16 << 20)})
    write_payload(tmp_path / "first", Payload("k", {}, {"a": torch.ones(4)}))  # one-time set-up
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status_kib("VmRSS")
    write_payload(tmp_path / STATE, Payload("k", {}, buffer.tensors))
    assert _status_kib("VmHWM") - before < 16 << 10


def _status_kib(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])
