"""Does it work on this device: strategy switches, sleep and wake, reshard with checksums, memory per phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tools.bench.gpu_measure.measurement import Measurement, Settings

if TYPE_CHECKING:
    from megatron_tlt.bench.result import BenchmarkResult
    from tools.bench.gpu_measure.child import Job
    from tools.bench.gpu_measure.record import Rows

SHAPE = "0.5b"
DRAFTS = 3
SLEEPS = ((1, "first"), (2, "second"), (2, "third"))
"""Levels: 1 keeps weights on the host, 2 drops them, as between a rollout and an update."""


def measurements(settings: Settings) -> list[Measurement]:
    """Two processes, since an engine with sleep mode is alone in its process on a GPU."""
    return [
        Measurement("engine", "smoke:measure_engine", expected_s=110),
        Measurement("reshard", "smoke:measure_reshard", expected_s=110),
    ]


def device_memory(settings: Settings) -> dict[str, float]:
    """Used and free GiB of the whole device, pools of sleeping engines included; on a CPU the resident size."""
    import torch

    if not settings.on_gpu:
        from megatron_tlt.platform.device import current_device

        return {"resident_gib": current_device().memory_bytes() / 2**30}
    free, total = torch.cuda.mem_get_info()
    return {"used_gib": (total - free) / 2**30, "free_gib": free / 2**30}


def equal_share(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Share of responses that are equal token for token."""
    equal = [list(a.token_ids) == list(b.token_ids) for a, b in zip(found, expected, strict=True)]
    return sum(equal) / len(equal)


def measure_engine(job: Job) -> None:
    """Greedy responses under every strategy, while it changes, and after each sleep."""
    from megatron_tlt.rollout.vllm_engine import VllmEngine
    from megatron_tlt.speculation.strategy import OFF, Strategy
    from tools.bench.gpu_measure import engines, models

    settings = job.settings
    engines.start_process()
    target = job.work / "target"
    vocab = models.write_config(target, SHAPE, settings, tie_word_embeddings=False)["vocab_size"]
    head = models.write_head(job.work / "head", target, settings)
    job.emit(phase="start", **device_memory(settings))
    rollout = engines.rollout_config(settings, 64, 96, max_num_seqs=16)
    engine = VllmEngine(target, rollout, engines.head_section(head, DRAFTS), 0)
    job.emit(phase="engine built", vllm=engine.vllm_version, **device_memory(settings))
    count, length = (4, 24) if settings.small else (16, 96)
    requests = engines.make_requests(count, 16, [length] * count, vocab, 0.0)
    strategies = [OFF, Strategy("eagle3", 1), Strategy("eagle3", DRAFTS)]
    expected = {}
    for weights, fill in (("random", models.fill_random), ("chain", models.fill_chain)):
        fill(engine, 1)
        engine.set_strategy(OFF)
        expected[weights] = engine.generate(requests)
        for strategy in strategies:
            engine.set_strategy(strategy)
            found = engine.generate(requests)
            share = equal_share(found, expected[weights])
            job.emit(phase="strategy", weights=weights, strategy=strategy.name, equal_share=share)
        found = engine.generate(requests, chooser=_Alternating(strategies))
        share = equal_share(found, expected[weights])
        job.emit(phase="switches", weights=weights, strategy="each step another", equal_share=share)
    response = models.chain_response(requests[0].prompt_token_ids, length, vocab)
    job.emit(phase="chain", equal_share=float(list(expected["chain"][0].token_ids) == response))
    for level, which in SLEEPS:
        engine.sleep(level)
        job.emit(phase=f"{which} sleep", level=level, **device_memory(settings))
        engine.wake_up(["weights"])
        if level > 1:
            models.fill_chain(engine, 1)
            engine.restore_drafter()
        engine.wake_up(["kv_cache"])
        found = engine.generate(requests)
        share = equal_share(found, expected["chain"])
        job.emit(phase=f"{which} wake", level=level, equal_share=share, **device_memory(settings))


class _Alternating:
    """Another strategy before each step."""

    def __init__(self, strategies: Sequence[Any]) -> None:
        self._strategies, self._step = strategies, 0

    def next(self, batch: int, requests: Any) -> tuple[Any, None]:
        self._step += 1
        return self._strategies[self._step % len(self._strategies)], None

    def observe(self, step: Any) -> None:
        """Learns nothing."""


def measure_reshard(job: Job) -> None:
    """A policy's weights into an engine of dummies, each verified by its checksum."""
    from megatron_tlt.actor.policy import Policy
    from megatron_tlt.config.schema import ActorConfig, ModelConfig, TltConfig
    from megatron_tlt.config.task import TaskConfig
    from megatron_tlt.rollout.vllm_engine import VllmEngine
    from megatron_tlt.trainer.synchronization import policy_sync
    from tools.bench.gpu_measure import engines, models

    settings = job.settings
    engines.start_process()
    target = job.work / "target"
    vocab = models.write_config(target, SHAPE, settings)["vocab_size"]
    parameters = models.write_weights(target, settings)
    config = TltConfig(
        model=ModelConfig(path=target),
        tasks=[TaskConfig(name="gcd")],
        actor=ActorConfig(transformer_impl="local", megatron={"bf16": settings.on_gpu}),
        rollout=engines.rollout_config(settings, 64, 64, max_num_seqs=16, gpu_memory_utilization=0.4),
        speculation=engines.head_section(None, 0),
    )
    policy = Policy(target, config.actor, seed=0, trainable=False)
    job.emit(phase="policy built", parameters=parameters, **device_memory(settings))
    engine = VllmEngine(target, config.rollout, config.speculation, seed=0)
    job.emit(phase="engine built", **device_memory(settings))
    sync = policy_sync(config, policy, engine)
    report = sync.sync(version=1, verify=True)
    job.emit(
        phase="reshard",
        tensors=report.tensors,
        verified_tensors=report.verified_tensors,
        seconds=report.seconds,
        copied_bytes=report.copied_bytes,
        **device_memory(settings),
    )
    count = 4
    requests = engines.make_requests(count, 16, [16] * count, vocab, 0.0)
    before = engine.generate(requests)
    engine.sleep(2)
    engine.wake_up(["weights"])
    sync.sync(version=2, verify=True)
    engine.wake_up(["kv_cache"])
    share = equal_share(engine.generate(requests), before)
    job.emit(phase="reshard after sleep", equal_share=share, **device_memory(settings))


def judge(result: BenchmarkResult, rows: Rows) -> None:
    """Targets over all repeats; random weights in bfloat16 are reported only, as ties depend on the batch."""
    engine = [row for repeat in rows.get("engine", ()) for row in repeat]
    if engine:
        switched = [row for row in engine if row.get("weights") == "chain"]
        result.target("equal greedy responses under all strategies", _lowest(switched), "==", 1.0)
        woken = [row for row in engine if row["phase"].endswith("wake")]
        result.target("equal responses after sleep", _lowest(woken), "==", 1.0)
    moved = [row for repeat in rows.get("reshard", ()) for row in repeat]
    if moved:
        reports = [row for row in moved if row["phase"] == "reshard"]
        verified = min(row["verified_tensors"] / row["tensors"] for row in reports)
        result.target("share of tensors verified", verified, "==", 1.0)
        slept = [row for row in moved if row["phase"] == "reshard after sleep"]
        result.target("equal responses after sleep and reshard", _lowest(slept), "==", 1.0)


def _lowest(rows: Sequence[dict[str, Any]]) -> float:
    return min(float(row["equal_share"]) for row in rows)
