"""What the rollout package uses of vLLM, read from the package's own sources.

Imports, attributes of vLLM's objects, and the keywords of calls. An object is recognised by the name that it has in our
code (``RECEIVERS``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_tlt" / "rollout"
Part = tuple[str, str]
"""(module, dotted attribute)."""

_ENGINE = {
    "_llm": ("vllm.v1.engine.llm_engine", "LLMEngine"),
    "llm": ("vllm.v1.engine.llm_engine", "LLMEngine"),
    "scheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "_scheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "scheduler_output": ("vllm.v1.core.sched.output", "SchedulerOutput"),
    "scheduled": ("vllm.v1.core.sched.output", "SchedulerOutput"),
}
_FIRST_BATCH: Part = ("vllm.v1.worker.gpu_input_batch", "InputBatch")
_FIRST_RUNNER: Part = ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
_SECOND_RUNNER: Part = ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner")
_SPECULATOR: Part = ("vllm.v1.worker.gpu.spec_decode.eagle.speculator", "EagleSpeculator")
_FIRST = {
    **_ENGINE,
    "runner": _FIRST_RUNNER,
    "_runner": _FIRST_RUNNER,
    "batch": _FIRST_BATCH,
    "input_batch": _FIRST_BATCH,
    "proposer": ("vllm.v1.spec_decode.eagle", "EagleProposer"),
    "_proposer": ("vllm.v1.spec_decode.eagle", "EagleProposer"),
}
_SECOND = {
    **_ENGINE,
    "runner": _SECOND_RUNNER,
    "_runner": _SECOND_RUNNER,
    "input_batch": ("vllm.v1.worker.gpu.input_batch", "InputBatch"),
    "speculator": _SPECULATOR,
    "_speculator": _SPECULATOR,
    "_states": ("vllm.v1.worker.gpu.states", "RequestState"),
    "manager": ("vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager"),
}
_OF_SECOND = {"vllm_runner_v2.py", "vllm_head_v2.py", "vllm_graphs.py"}
_OF_BOTH = {"vllm_engine.py", "vllm_setup.py"}
OWN = {"chances", "vars", "__dataclass_fields__"}
"""Attributes that our code adds to vLLM's objects, or that Python gives them."""


def receivers_of(file: str) -> tuple[Mapping[str, Part], ...]:
    """Our names of vLLM's objects in a file -> their classes; once for each model runner that the file is for."""
    if file in _OF_BOTH:
        return _FIRST, _SECOND
    return (_SECOND,) if file in _OF_SECOND else (_FIRST,)


@dataclass(frozen=True)
class Call:
    """A call of a part by keywords, at ``place`` (file:line)."""

    part: Part
    keywords: tuple[str, ...]
    place: str


@dataclass(frozen=True)
class Uses:
    """``parts`` that our code imports or reads, and its calls of them."""

    parts: frozenset[Part]
    calls: tuple[Call, ...]


def uses_of(folder: Path = PACKAGE, files: Iterable[str] | None = None) -> Uses:
    """What the modules of ``folder`` (those of ``files``; None: all) use of vLLM."""
    parts: set[Part] = set()
    calls: list[Call] = []
    for path in sorted(folder.glob("*.py")):
        if files is not None and path.name not in files:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported, asked = dict(_imported(tree)), set(_asked_for(tree))
        for receivers in receivers_of(path.name):
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr in asked:
                    continue
                if isinstance(node, ast.Attribute) and (part := _part(node, receivers, imported)) is not None:
                    parts.add(part)
                if isinstance(node, ast.Call) and (part := _part(node.func, receivers, imported)) is not None:
                    keywords = tuple(each.arg for each in node.keywords if each.arg is not None)
                    calls.append(Call(part, keywords, f"{path.name}:{node.lineno}"))
        parts |= set(imported.values())
    return Uses(frozenset(parts), tuple(dict.fromkeys(call for call in calls if call.keywords)))


def _imported(tree: ast.Module) -> Iterator[tuple[str, Part]]:
    """Name -> part that it was imported as."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            for alias in node.names:
                yield alias.asname or alias.name, (node.module, alias.name)


def _asked_for(tree: ast.Module) -> Iterator[str]:
    """Attributes that the code takes only if they exist."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("hasattr", "getattr"):
            continue
        if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            yield str(node.args[1].value)


def _part(node: ast.expr, receivers: Mapping[str, Part], imported: Mapping[str, Part]) -> Part | None:
    """The part that an expression names; None: it is not one of vLLM's."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if not isinstance(node, ast.Attribute) or node.attr in OWN:
        return None
    if isinstance(node.value, ast.Name) and node.value.id in imported:
        module, name = imported[node.value.id]
        return module, f"{name}.{node.attr}"
    holder = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
    if holder in receivers:
        module, name = receivers[holder]
        return module, f"{name}.{node.attr}"
    return None
