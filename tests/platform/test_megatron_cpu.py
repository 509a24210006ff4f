"""The CPU adapter changes what Megatron sees of torch, and nothing else.

The order of imports is what matters here: these processes begin with none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import run_python, run_torchrun

SCRIPT = """
import torch
real_empty, real_cuda = torch.empty, torch.cuda
from megatron_tlt.platform.device import prepare
prepare()
import megatron.core.tensor_parallel.mappings as scoped
import megatron.core.utils

assert torch.empty is real_empty and torch.cuda is real_cuda, "torch itself was changed"
assert scoped.torch is not torch
assert scoped.torch.empty(2, device="cuda").device.type == "cpu"
assert scoped.torch.zeros(2, device=scoped.torch.cuda.current_device()).device.type == "cpu"
assert isinstance(torch.device("cpu"), scoped.torch.device)
assert scoped.torch.nn is torch.nn

tensor = torch.zeros(2)
assert tensor.type() == "torch.FloatTensor", "outside Megatron a CPU tensor is a CPU tensor"
assert eval("t.type()", scoped.__dict__, {"t": tensor}) == "torch.cuda.FloatTensor"
assert eval("t.cuda()", scoped.__dict__, {"t": tensor}) is tensor
try:
    tensor.cuda()
except (RuntimeError, AssertionError):
    pass
else:
    raise SystemExit("outside Megatron .cuda() must fail on a machine without a GPU")
print("scoped")
"""


@pytest.mark.distributed
def test_only_megatrons_modules_see_the_proxy(tmp_path: Path) -> None:
    script = tmp_path / "scope.py"
    script.write_text(SCRIPT)
    assert "scoped" in run_python(script, timeout_s=180, fresh=True)


@pytest.mark.distributed
def test_importing_megatron_first_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text(
        "import sys, types\n"
        "sys.modules['megatron'] = types.ModuleType('megatron')\n"
        "from megatron_tlt.platform import megatron_cpu\n"
        "try:\n    megatron_cpu.install()\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    assert "megatron was imported before the CPU adapter" in run_python(script, timeout_s=120, fresh=True)


@pytest.mark.distributed
def test_parts_of_different_sizes_are_gathered_and_scattered() -> None:
    log = run_torchrun(Path(__file__).parent / "workers" / "uneven_parts.py", 2)
    assert log.count("uneven parts came and went") == 2
