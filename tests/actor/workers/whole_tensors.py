"""Steps optimizers of whole tensors under a layout, beside plain torch on the same gradients; resumes under another."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_tlt.actor.megatron_checkpoint import load_policy
from megatron_tlt.actor.policy import Policy
from megatron_tlt.actor.whole_tensors import WholeTensorOptimizer
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.config.import_path import load_object
from megatron_tlt.config.lora import LoraConfig
from megatron_tlt.config.optimizer import LrScheduleConfig, OptimizerSplitConfig, split_tensors
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.models.lora_weights import LORA_A, LORA_B
from megatron_tlt.optim.whole_tensor import step_argument
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.actor.workers.layouts import batch, equal, samples, weights_of
from tests.actor.workers.optimizers import save

STEPS, WARMUP, TOTAL, WEIGHT_DECAY, CLIP = 5, 2, 6, 0.01, 0.5
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp2": {},
        "tp2": {"tensor_model_parallel_size": 2},
        "ep2": {"expert_model_parallel_size": 2},
    },
    4: {
        "pp2dp2": {"pipeline_model_parallel_size": 2},
        "tp2pp2sp": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    },
}
ONLY_UNDER = {
    "ep2": ("learned", "muon"),
    "tp2": ("muon", "adafactor", "soap", "coupled", "muon-lora", "pylo-adafaclo"),  # the slowest layout on two cores
}
RESUMED_UNDER = {"tp2": "dp2", "ep2": "dp2", "tp2pp2sp": "pp2dp2"}
RESUME = "--resume="
"""Option of a run of two ranks: the folder of one of four, whose checkpoints it resumes."""
RESUMED_ALIKE = ("dp2", "pp2dp2")


@dataclass(frozen=True)
class Case:
    """A class, its arguments, and those of the split if it has one."""

    path: str
    lr: float
    arguments: dict[str, Any] = field(default_factory=dict)
    split: OptimizerSplitConfig | None = None
    decay: float = WEIGHT_DECAY
    bf16: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)
    lora: LoraConfig | None = None
    schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)

    def rate(self, update: int) -> float:
        """The share of the highest rate at an update, counted from 1."""
        if update <= WARMUP:
            return update / WARMUP
        schedule = self.schedule
        end = schedule.end(TOTAL)
        done = (update - WARMUP) / (end - WARMUP)
        if schedule.kind == "wsd":
            left = min(1.0, (end - update) / (schedule.decay_steps(TOTAL) + end - TOTAL))
        else:
            left = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}[
                schedule.kind
            ]
        return schedule.min_lr_fraction + (1.0 - schedule.min_lr_fraction) * left


CASES = {
    "muon": Case(
        "torch.optim.Muon",
        2e-2,
        {"momentum": 0.9},
        OptimizerSplitConfig(lr=1e-3, weight_decay=0.02),
        schedule=LrScheduleConfig(kind="wsd", min_lr_fraction=0.1, decay_fraction=0.5),
    ),
    "adafactor": Case(
        "torch.optim.Adafactor",
        1e-2,
        schedule=LrScheduleConfig(kind="linear"),
        ddp={"overlap_grad_reduce": True, "bucket_size": 20000},
    ),
    "soap": Case(
        "pytorch_optimizer.SOAP",
        3e-3,
        {"precondition_frequency": 2},
        schedule=LrScheduleConfig(kind="cosine", min_lr_fraction=0.2),
    ),
    "learned": Case("megatron_tlt.bench.learned_optimizer.FactoredMlp", 1e-3),
    "coupled": Case("tests.helpers.coupled_optimizer.CoupledRnn", 1e-3, decay=0.0),
    "learned-bf16": Case("megatron_tlt.bench.learned_optimizer.FactoredMlp", 1e-3, bf16=True),
    "muon-lora": Case("torch.optim.Muon", 1e-2, lora=LoraConfig(rank=4)),
    "vectors": Case("tests.helpers.coupled_optimizer.DecaysVectors", 1e-2, decay=0.1),
    "replacing": Case("tests.helpers.coupled_optimizer.Replacing", 1e-2, decay=0.0),
    # of the package, with random weights; not among the stand-ins
    "pylo-adafaclo": Case("pylo.optim.AdafacLO_naive", 0.1, {"hf_key": "{mlp}"}),
    "pylo-velo": Case("pylo.optim.VeLO_naive", 1e-3, {"hf_key_rnn": "{rnn}", "hf_key_mlp": "{velo}"}),
    "pylo-celo2": Case("pylo.optim.CELO2_naive", 1e-3, {"hf_key": None}),
    "pylo-elo": Case("pylo.optim.ELO_naive", 1e-3, {"hf_key": None}),
}
STAND_INS = [name for name in CASES if not name.startswith("pylo-")]


def write_pylo_weights(folder: Path) -> None:
    """Random weights of PyLO's networks, as folders such as its hub has."""
    from pylo.models.Meta_MLP import MetaMLP
    from pylo.models.VeLO_MLP import VeLOMLP
    from pylo.models.VeLO_RNN import VeLORNN

    torch.manual_seed(0)
    for name, network in (("mlp", MetaMLP(39, 32, 1)), ("rnn", VeLORNN()), ("velo", VeLOMLP())):
        network.save_pretrained(folder / name)


def case_of(name: str, weights: Path) -> Case:
    """The case, with the folders of learned optimizers' weights."""
    found = CASES[name]
    given = {
        k: v.format(**{n: weights / n for n in ("mlp", "rnn", "velo")}) if isinstance(v, str) else v
        for k, v in found.arguments.items()
    }
    return replace(found, arguments=given)


def policy_of(folder: Path, case: Case, layout: str, processes: int, model: str | None = None) -> Policy:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    actor = ActorConfig(
        transformer_impl="local",
        megatron={**LAYOUTS[processes][layout], **({"bf16": True} if case.bf16 else {})},
        optimizer={"optimizer": case.path, "lr": case.lr, "weight_decay": case.decay, "clip_grad": CLIP},
        optimizer_arguments=case.arguments,
        optimizer_split=case.split,
        lr_warmup_steps=WARMUP,
        lr_schedule=case.schedule,
        ddp=case.ddp,
        lora=case.lora,
        max_tokens_per_micro_batch=64,
    )
    return Policy(folder / (model or model_of(layout)), actor, seed=0, total_steps=TOTAL)


def model_of(layout: str) -> str:
    return "moe" if layout == "ep2" else "dense"


def trained(policy: Policy) -> dict[str, torch.Tensor]:
    """The whole tensors that are trained."""
    if policy.lora is None:
        return weights_of(policy)
    return {name: tensor.clone() for name, tensor in policy.export_adapters()}


def gathered(optimizer: WholeTensorOptimizer, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors of all owners, on every rank."""
    found = {}
    for name, owner in optimizer.owners.items():
        found[name] = tensors[name].clone() if owner == rank() else torch.zeros(optimizer.shapes[name])
        dist.broadcast(found[name], owner)
    return found


def digests(policy: Policy) -> dict[str, str]:
    """Of the float32 weights and each leaf of the state of all tensors, by name; the same on every rank."""
    found = {}
    for part in policy.optimizer.parts:
        for name, master in part.masters.items():
            for path, leaf in {"weights": master.data, **part.leaves_of(name)}.items():
                if isinstance(leaf, torch.Tensor):
                    data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    what = f"{leaf.dtype} {tuple(leaf.shape)} {hashlib.sha256(data).hexdigest()}"
                found[f"{name}/{path}"] = what if isinstance(leaf, torch.Tensor) else repr(leaf)
    return {key: value for one in all_gather_data(found, dict[str, str]) for key, value in one.items()}


class PlainTorch:
    """The same classes over whole tensors in one process."""

    def __init__(self, case: Case, start: dict[str, torch.Tensor]) -> None:
        self._begun = case, start
        self._steps: list[tuple[dict[str, torch.Tensor], float]] = []
        self.tensors = {name: torch.nn.Parameter(tensor.float().clone()) for name, tensor in start.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in start.items()}
        main, others = split_tensors(shapes, case.split)
        self._optimizers = [self._built(case.path, case.lr, case.decay, case.arguments, main)]
        if case.split is not None:
            split = case.split
            arguments = split.optimizer_arguments
            self._optimizers.append(self._built(split.optimizer, split.lr, split.weight_decay, arguments, others))

    def _built(self, path: str, lr: float, decay: float, arguments: dict[str, Any], names: list[str]) -> Any:
        cls = load_object(path, "case", lambda found: isinstance(found, type), "class", "a class")
        own = [self.tensors[name] for name in names]
        groups = []
        for tensors, of in (([t for t in own if t.dim() > 1], decay), ([t for t in own if t.dim() == 1], 0.0)):
            groups += [{"params": tensors, "highest": lr, **({"weight_decay": of} if decay else {})}] if tensors else []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            # from the constructor's decay a class may derive more, such as that of vectors
            return cls(groups, lr=lr, **({"weight_decay": 0.0} if decay else {}), **arguments)

    def again(self) -> PlainTorch:
        """Another one in the same state; classes cannot be copied."""
        other = PlainTorch(*self._begun)
        for step in self._steps:
            other.step(*step)
        return other

    def step(self, gradients: dict[str, torch.Tensor], loss: float) -> None:
        self._steps.append((gradients, loss))
        for name, tensor in self.tensors.items():
            tensor.grad = gradients[name].clone()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["highest"] * self._begun[0].rate(len(self._steps))
            if step_argument(type(optimizer)) == "loss":
                optimizer.step(torch.tensor(loss))
            else:
                optimizer.step()


def _of_experts(name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a folder, of which transformers' own module stacks those of all experts."""
    layer, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        named = {"gate_proj": gradient.chunk(2, dim=1)[0], "up_proj": gradient.chunk(2, dim=1)[1]}
    elif kind == "down_proj":
        named = {"down_proj": gradient}
    else:
        return {name: gradient}
    return {f"{layer}.{e}.{own}.weight": of[e] for own, of in named.items() for e in range(len(of))}


@functools.cache
def plain_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """The gradients of the first step by Hugging Face's own model in this process."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = sum(len(sample.token_ids) - sample.prompt_length for sample in samples())
    for sample in samples():
        ids = torch.tensor([sample.token_ids])
        logits = model(ids).logits[0, sample.prompt_length - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, sample.prompt_length :], reduction="sum")
        (loss / tokens).backward()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found |= _of_experts(name, parameter.grad)
    return found


def of_adapters(
    gradients: dict[str, torch.Tensor], adapters: dict[str, torch.Tensor], lora: LoraConfig
) -> dict[str, torch.Tensor]:
    """The gradients of new adapters, whose second factors are 0, from those of the weights."""
    found = {}
    for name, tensor in adapters.items():
        if name.endswith(LORA_A):
            base = name.removesuffix(LORA_A)
            found[name] = torch.zeros_like(tensor)
            found[base + LORA_B] = lora.alpha / lora.rank * gradients[base + ".weight"] @ tensor.T
    return found


def gradient_distance(policy: Policy, grad_norm: float, expected: dict[str, torch.Tensor]) -> float:
    """How far gradients and norm of the step just taken are from these, relative to the norm of all."""
    norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    clipped = CLIP / (norm + 1e-6)
    found = gathered(policy.optimizer, policy.optimizer.gradients)
    assert clipped < 1.0 and found.keys() == expected.keys()
    off = [float((found[name] - expected[name] * clipped).norm() / (norm * clipped)) for name in expected]
    return max(*off, abs(grad_norm / norm - 1.0))


def train(policy: Policy, steps: int, plain: PlainTorch | None = None) -> list[dict[str, float]]:
    """The metrics of each step."""
    metrics = []
    for _ in range(steps):
        metrics.append(policy.update(batch(), negative_log_likelihood))
        if plain is not None:
            # the clipped ones, as the class saw them
            plain.step(gathered(policy.optimizer, policy.optimizer.gradients), metrics[-1]["loss"])
    return metrics


def distance(policy: Policy, plain: PlainTorch) -> float:
    """The largest difference between a weight and plain torch's, relative to the largest weight of its tensor."""
    own = trained(policy)
    assert own.keys() == plain.tensors.keys()
    return max(
        float((own[name].float() - tensor.detach()).abs().max() / tensor.detach().abs().max())
        for name, tensor in plain.tensors.items()
    )


def run(models: Path, out: Path, name: str, layout: str, processes: int) -> dict[str, Any]:
    case = case_of(name, out)
    policy = policy_of(models, case, layout, processes)
    plain = PlainTorch(case, trained(policy))
    begun, rest, model = 2, STEPS - 2, model_of(layout)
    resumes = layout in RESUMED_ALIKE
    fresh = save(policy, out / f"{name}-{layout}-0") if resumes else None
    start = trained(policy)
    metrics = train(policy, 1, plain)
    expected = plain_gradients(models / model)
    if case.lora is not None:
        expected = of_adapters(expected, start, case.lora)
    row: dict[str, Any] = {"gradient_off": gradient_distance(policy, metrics[0]["grad_norm"], expected)}
    metrics += train(policy, begun - 1, plain)
    early, plain_early = trained(policy), plain.again()
    halfway, state = save(policy, out / f"{name}-{layout}-2"), digests(policy)
    metrics += train(policy, rest, plain)
    row |= {"losses": [each["loss"] for each in metrics], "distance": distance(policy, plain)}
    row["owners"] = len(set(policy.optimizer.owners.values()))
    after = trained(policy)
    if fresh is not None:
        again = policy_of(models, case, layout, processes)
        load_policy(again, fresh)
        train(again, begun)
        row["fresh_is_bit_equal"] = equal(early, trained(again))
        load_policy(again, halfway)
        train(again, rest)
        row["resume_is_bit_equal"] = equal(after, trained(again))
    else:
        other = policy_of(models, case, RESUMED_UNDER[layout], processes, model)
        load_policy(other, halfway)
        row["state"] = state
        row["resharded_state_is_equal"] = digests(other) == state
        row["resharded_losses"] = [each["loss"] for each in train(other, rest, plain_early)]
        row["resharded_distance"] = distance(other, plain_early)
    return row


def resume(models: Path, saved: Path, name: str) -> dict[str, Any]:
    """Goes on under two ranks from what four saved."""
    policy = policy_of(models, case_of(name, saved), "dp2", 2)
    load_policy(policy, saved / f"{name}-tp2pp2sp-2")
    state = digests(policy)
    return {"state": state, "losses": [each["loss"] for each in train(policy, STEPS - 2)]}


def main(models: str, out: str, *names: str) -> None:
    initialize_distributed(120)
    processes = dist.get_world_size()
    if names[0].startswith(RESUME):
        saved, *names_of_four = names
        found = {name: resume(Path(models), Path(saved.removeprefix(RESUME)), name) for name in names_of_four}
        if rank() == 0:
            Path(out, "rows.json").write_text(json.dumps(found))
        barrier()
        return
    if rank() == 0 and any(name.startswith("pylo-") for name in names):
        write_pylo_weights(Path(out))
    barrier()
    rows = {}
    for layout in LAYOUTS[processes]:
        for name in names:
            if name in ONLY_UNDER.get(layout, names):
                rows[f"{name} {layout}"] = run(Path(models), Path(out), name, layout, processes)
    if rank() == 0:
        Path(out, "rows.json").write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
