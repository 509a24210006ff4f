"""Actor, engine and drafter on one GPU at the 1.5B shape: their phases, what passes between them, and RL steps."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tools.bench.gpu_measure.measurement import Measurement, Settings

if TYPE_CHECKING:
    from megatron_tlt.bench.result import BenchmarkResult
    from tools.bench.gpu_measure.child import Job
    from tools.bench.gpu_measure.record import Rows

SHAPE = "1.5b"


def sizes(settings: Settings) -> dict[str, Any]:
    """Sequences, their tokens, and tokens of a micro-batch; the GPU's is 65,536 tokens an update."""
    if settings.small:
        return {
            "sequences": 4,
            "tokens": 64,
            "micro_batch": 128,
            "repeats": 2,
            "group": 2,
            "prompts": 2,
            "response": 24,
        }
    return {
        "sequences": 32,
        "tokens": 2048,
        "micro_batch": 8192,
        "repeats": 3,
        "group": 8,
        "prompts": 8,
        "response": 512,
    }


def measurements(settings: Settings) -> list[Measurement]:
    """The phases in one process, and a run of two steps that is resumed for a third."""
    own = sizes(settings)
    return [
        Measurement("phases", "colocate:measure_phases", own, expected_s=240),
        Measurement("rl", "colocate:measure_rl", own, expected_s=300),
    ]


def timed(action: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each repeat, the device's work included; one before them is not counted."""
    from megatron_tlt.platform.device import current_device

    seconds = []
    for _ in range(repeats + 1):
        current_device().synchronize()
        began = time.perf_counter()
        action()
        current_device().synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def actor_options(settings: Settings) -> dict[str, Any]:
    """``actor.megatron``: bfloat16 on a GPU. Nothing is computed again: 80 GB hold a micro-batch's activations."""
    return {"bf16": True} if settings.on_gpu else {}


def train_flops(config: dict[str, Any], parameters: int, tokens: int, length: int) -> float:
    """Operations of an update: 6 per weight that is multiplied and token, and causal attention's; none recomputed."""
    embedding = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"]
    attention = 6 * config["num_hidden_layers"] * config["hidden_size"] * length
    return float(tokens) * (6 * (parameters - embedding) + attention)


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 operations per second of an H100 or H200, from the data sheet; None for others."""
    from megatron_tlt.planning.devices import known_devices

    found = [
        spec.flops for key, spec in known_devices().items() if key.split("-")[0] in re.split(r"[^A-Za-z0-9]+", name)
    ]
    return found[0] if found else None


def measure_phases(job: Job) -> None:
    """Each phase of an RL step on its own, in the order in which they share the device."""
    from megatron_tlt.actor.megatron_offload import PhaseOffload
    from megatron_tlt.actor.policy import Policy
    from megatron_tlt.config.schema import ActorConfig, ModelConfig, TltConfig
    from megatron_tlt.config.task import TaskConfig
    from megatron_tlt.rollout.vllm_engine import VllmEngine
    from megatron_tlt.trainer.synchronization import policy_sync
    from tools.bench.gpu_measure import engines, models
    from tools.bench.gpu_measure.smoke import device_memory

    given, settings = job.given, job.settings
    engines.start_process()
    target = job.work / "target"
    shape = models.write_config(target, SHAPE, settings)
    parameters = models.write_weights(target, settings)
    actor = ActorConfig(
        transformer_impl="local",
        megatron=actor_options(settings),
        optimizer={"lr": 1e-6},
        max_tokens_per_micro_batch=given["micro_batch"],
        log_prob_chunk_tokens=2048,
    )
    config = TltConfig(
        model=ModelConfig(path=target),
        tasks=[TaskConfig(name="gcd")],
        actor=actor,
        rollout=engines.rollout_config(settings, 64, 192, max_num_seqs=64, gpu_memory_utilization=0.5),
        speculation=engines.head_section(None, 0),
    )
    policy = Policy(target, actor, seed=0)
    job.emit(phase="policy built", parameters=parameters, **device_memory(settings))
    _actor(job, policy, shape, parameters)
    memory = policy.memory if settings.on_gpu else PhaseOffload(policy.model, policy.optimizer, enabled=True)
    _offload(job, memory)

    memory.offload()
    job.emit(phase="policy offloaded", **device_memory(settings))
    engine = VllmEngine(target, config.rollout, config.speculation, 0)
    job.emit(phase="engine built", **device_memory(settings))
    models.fill_random(engine, 1)
    count = 4 if settings.small else 64
    requests = engines.make_requests(count, 64, [16 if settings.small else 128] * count, shape["vocab_size"], 1.0)
    engine.generate(requests)
    for turn in range(given["repeats"]):
        slept = _once(lambda: engine.sleep(2))
        job.emit(phase="engine asleep", turn=turn, seconds=slept, **device_memory(settings))
        woken = _once(engine.wake_up)
        job.emit(phase="engine awake", turn=turn, seconds=woken, **device_memory(settings))
    memory.reload()
    _reshard(job, policy_sync(config, policy, engine), engine)
    engine.generate(requests)
    memory.offload()
    engine.sleep(2)
    _train_drafter(job, target, shape)


def _once(action: Callable[[], Any]) -> float:
    from megatron_tlt.platform.device import current_device

    current_device().synchronize()
    began = time.perf_counter()
    action()
    current_device().synchronize()
    return time.perf_counter() - began


def _actor(job: Job, policy: Any, shape: dict[str, Any], parameters: int) -> None:
    import random

    import torch

    from megatron_tlt.algorithms.losses import negative_log_likelihood
    from megatron_tlt.data.rollout_batch import RolloutBatch
    from tools.bench.gpu_measure.smoke import device_memory

    given, rng = job.given, random.Random(0)
    length, count = given["tokens"], given["sequences"]
    sequences = [[rng.randrange(shape["vocab_size"]) for _ in range(length)] for _ in range(count)]
    batch = RolloutBatch.of_sequences(sequences, [length // 8] * count)
    tokens = count * length
    flops = train_flops(shape, parameters, tokens, length)
    peak = peak_flops(job.settings.device_name)
    for phase, action, part in (
        ("log-probs", lambda: policy.log_probs(batch), 1 / 3),
        ("update", lambda: policy.update(batch, negative_log_likelihood), 1.0),
    ):
        if job.settings.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for seconds in timed(action, given["repeats"]):
            rate = part * flops / seconds
            peak_gib = torch.cuda.max_memory_allocated() / 2**30 if job.settings.on_gpu else None
            row = {"seconds": seconds, "tokens_per_s": tokens / seconds, "tflops": rate / 1e12, "peak_gib": peak_gib}
            job.emit(phase=phase, mfu=rate / peak if peak else None, **row, **device_memory(job.settings))


def _offload(job: Job, memory: Any) -> None:
    """GB/s of what is moved; beside it plain copies between pinned memory and the device."""
    import torch

    from megatron_tlt.actor.megatron_offload import gradient_buffers
    from tools.bench.gpu_measure.smoke import device_memory

    size = 1 << (22 if job.settings.small else 30)
    here = torch.empty(size, dtype=torch.uint8, device=job.settings.device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=job.settings.on_gpu)
    to_host, to_device = (size / min(timed(partial(b.copy_, a), 5)) / 1e9 for a, b in ((here, host), (host, here)))
    del here, host
    # not copied: they are zeroed before their next use
    dropped = sum(tensor.nbytes for tensor in gradient_buffers(memory._model.ddp_chunks))
    for turn in range(job.given["repeats"] + 1):  # the first one allocates pinned memory
        freed: list[int] = []
        offload_s = _once(lambda found=freed: found.append(memory.offload()))
        after = device_memory(job.settings)
        reload_s = _once(memory.reload)
        row = {"offload_s": offload_s, "reload_s": reload_s, "freed_gb": freed[0] / 1e9}
        row |= {"moved_gb": (freed[0] - dropped) / 1e9, "copy_to_host_gbs": to_host, "copy_to_device_gbs": to_device}
        job.emit(phase="offload", turn=turn, **row, **after)


def _reshard(job: Job, sync: Any, engine: Any) -> None:
    import torch

    size = sum(view.nbytes for _, view, _ in engine.read_weights())
    source = torch.empty(size, dtype=torch.uint8, device=job.settings.device)
    target = torch.empty_like(source)
    copy_s = statistics.median(timed(partial(target.copy_, source), 5))
    del source, target
    for verify in (False, True):
        for seconds in timed(partial(sync.sync, version=2, verify=verify), job.given["repeats"]):
            job.emit(phase="reshard", verify=verify, seconds=seconds, gb=size / 1e9, device_copy_s=copy_s)


def _train_drafter(job: Job, target: Any, shape: dict[str, Any]) -> None:
    """Steps of an EAGLE-3 drafter while the engine sleeps and the policy is on the host."""
    import torch

    from megatron_tlt.config.drafter import DrafterConfig
    from megatron_tlt.drafter import DrafterTrainer, Entry, drafter_from_target
    from tools.bench.gpu_measure.smoke import device_memory

    given, device = job.given, torch.device(job.settings.device)
    draft_vocab = min(32768, shape["vocab_size"])
    model = drafter_from_target(target, "eagle3", 1, draft_vocab_size=draft_vocab)
    model.share(model.shared.to(device))
    model.to(device)
    options = {"max_tokens_per_micro_batch": given["micro_batch"], "draft_vocab_size": draft_vocab}
    trainer = DrafterTrainer(model, DrafterConfig(kind="eagle3", **options), 0)
    generator = torch.Generator().manual_seed(0)
    entries = []
    for index in range(4):
        tokens = torch.randint(0, shape["vocab_size"], (given["tokens"],), generator=generator, dtype=torch.int32)
        hidden = torch.randn(given["tokens"], 4 * shape["hidden_size"], generator=generator).bfloat16()
        entries.append(Entry(f"0/{index}", 0, tokens, given["tokens"] // 8, hidden, 1.0))
    for turn in range(given["repeats"] + 1):
        outcome: list[str] = []
        seconds = _once(lambda found=outcome: found.append(trainer.train_step(entries).outcome))
        row = {"seconds": seconds, "tokens_per_s": 4 * given["tokens"] / seconds, "outcome": outcome[0]}
        job.emit(phase="drafter step", turn=turn, **row, **device_memory(job.settings))


def measure_rl(job: Job) -> None:
    """``tlt train`` for two steps, then the same command for a third, which resumes."""
    import json

    from megatron_tlt.errors import RunError
    from megatron_tlt.observe.metrics import METRICS_FILE, read_metrics
    from tools.bench.gpu_measure import models

    config = rl_config(job)
    models.write_weights(job.work / "target", job.settings)
    file = job.work / "rl.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    for steps in (2, 3):
        command = [sys.executable, "-m", "megatron_tlt", "train", str(file), f"trainer.steps={steps}", "--traceback"]
        began = time.perf_counter()
        status = subprocess.run(command).returncode
        seconds = time.perf_counter() - began
        if status:
            for log in sorted(job.work.glob("run/logs/*.log")):
                print(log.read_text(encoding="utf-8", errors="replace")[-4000:], flush=True)
            raise RunError(f"tlt train to step {steps}: status {status}")
        rows = read_metrics(job.work / "run" / METRICS_FILE)
        job.emit(phase="process", steps=steps, seconds=seconds)
        for row in rows:
            if not row["step"] or (steps == 3) != (row["step"] > 2):
                continue
            kept = {key: value for key, value in row.items() if key.startswith(("time/", "memory/", "reshard/"))}
            job.emit(phase="step", step=row["step"], resumed=steps == 3, **kept)


def rl_config(job: Job) -> dict[str, Any]:
    """The run's config; writes the model folder's config and tokenizer, whose vocabulary is a part of the model's."""
    from megatron_tlt.data.tokenizer_training import META_FILE, MODEL_FILE, train_tokenizer
    from tools.bench.gpu_measure import models

    given, settings, target = job.given, job.settings, job.work / "target"
    tokenizer = train_tokenizer(["1 + 2 = 3"], 256, target)
    for name in (
        META_FILE,
        MODEL_FILE,
    ):  # SentencePiece refuses the model's other ids; the Hugging Face files skip them
        (target / name).unlink()
    models.write_config(target, SHAPE, settings, eos_token_id=tokenizer.eos_id)
    dtype = str(models.dtype_of(settings)).removeprefix("torch.")
    vllm: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 64}
    vllm |= {"gpu_memory_utilization": 0.4} if settings.on_gpu else {"kv_cache_memory_bytes": 256 << 20}
    return {
        "run": {"name": "gpu-measure", "dir": str(job.work / "run"), "seed": 1},
        "launcher": {"nproc_per_node": 1},
        "model": {"path": str(target), "verify": False},
        "tasks": [{"name": "chain_sum", "verifier": "math"}],
        "actor": {
            "transformer_impl": "local",
            "megatron": actor_options(settings),
            "optimizer": {"lr": 1e-6},
            "max_tokens_per_micro_batch": given["micro_batch"],
            "log_prob_chunk_tokens": 2048,
        },
        "rollout": {"max_prompt_tokens": 64, "max_response_tokens": given["response"], "vllm": vllm},
        "speculation": {"drafter": "eagle3", "num_speculative_tokens": 3},
        "drafter": {"kind": "eagle3", "draft_vocab_size": 256, "session_steps": 2, "entries_per_step": 4},
        "algorithm": {"group_size": given["group"]},
        "rewards": {"workers": 1},
        "evaluation": {"problems": 2, "samples": 1},
        "trainer": {"prompts_per_step": given["prompts"], "save_every": 2, "keep_checkpoints": 1},
    }


def judge(result: BenchmarkResult, rows: Rows) -> None:
    """Medians over all repeats."""
    phases = [row for repeat in rows.get("phases", ()) for row in repeat]
    updates = [row["mfu"] for row in phases if row["phase"] == "update" and row["mfu"] is not None]
    if updates:
        result.target("update MFU", statistics.median(updates), ">=", 0.40)
    moved = [row for row in phases if row["phase"] == "offload" and row["turn"]]
    if moved:
        to_host = [row["moved_gb"] / row["offload_s"] / row["copy_to_host_gbs"] for row in moved]
        to_device = [row["moved_gb"] / row["reload_s"] / row["copy_to_device_gbs"] for row in moved]
        result.target("offload over a pinned copy's bandwidth", statistics.median(to_host), ">=", 0.8)
        result.target("reload over a pinned copy's bandwidth", statistics.median(to_device), ">=", 0.8)
    resharded = [row for row in phases if row["phase"] == "reshard" and not row["verify"]]
    if resharded:
        ratios = [row["seconds"] / row["device_copy_s"] for row in resharded]
        result.target("reshard over a device copy", statistics.median(ratios), "<=", 1.3)
