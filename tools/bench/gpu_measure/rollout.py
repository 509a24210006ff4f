"""Whole long-tailed rollouts of the 7B shape at a set acceptance: stock vLLM, off, static strategies, the tuner."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from tools.bench.gpu_measure import second_runner
from tools.bench.gpu_measure.measurement import Measurement, Settings

if TYPE_CHECKING:
    from megatron_tlt.bench.result import BenchmarkResult
    from tools.bench.gpu_measure.child import Job
    from tools.bench.gpu_measure.record import Rows

SHAPE = "7b"
STOCK, OFF_ARM, TUNER, STATIC = "stock", "off", "tuner", "static"
OFF_V2, TUNER_V2, STATIC_V2 = "V2 off", "V2 tuner", "V2 static"
"""Ours on the second model runner with asynchronous scheduling."""
DYNAMIC, ADAPTIVE = "stock dynamic", "stock adaptive"
"""vLLM's own choices of the number of drafts: by a schedule of batch sizes, or by confidence and measured costs."""
SCHEDULES = {0.6: ((4, 5), (16, 4), (48, 2), (96, 1)), 0.8: ((4, 7), (16, 7), (48, 5), (96, 3))}
"""The schedules of ``DYNAMIC`` by acceptance: up to so many requests, so many drafts; none above."""
WANTED = {0.6: 1.7, 0.8: 2.2}
"""Speed over stock by acceptance. The acceptance is set; the head's cost is real."""
STATICS = {0.6: (2, 3, 4), 0.8: (3, 5, 7)}
"""Numbers of drafts of the static strategies; a rehearsal has the middle one."""
PROMPT = 64
MOST = 7


def sizes(settings: Settings) -> dict[str, Any]:
    """The rollout's requests, and the bounds of their response lengths (Pareto's exponent 1.1)."""
    if settings.small:
        return {"requests": 8, "shortest": 12, "longest": 96}
    if settings.lean:
        return {"requests": 128, "shortest": 32, "longest": 1024}
    return {"requests": 128, "shortest": 256, "longest": 8192}


INTERPRETED = {"requests": 3, "shortest": 6, "longest": 24}
"""Sizes of a rehearsal on the second runner, whose kernels are interpreted."""


def arm_name(acceptance: float, arm: str) -> str:
    """The name of a measurement that speculates."""
    return f"{arm} at {acceptance}"


def label(arm: str, drafts: int) -> str:
    """An arm's name in rows: a static strategy's own in place of "static"."""
    return arm.replace(STATIC, f"eagle3-{drafts}")


def measurements(settings: Settings) -> list[Measurement]:
    """An engine each. The headline's arms come first."""
    own = sizes(settings)
    second = {**own, **INTERPRETED} if settings.small else own
    found = [
        Measurement(STOCK, "rollout:measure_stock", own, expected_s=200),
        Measurement(OFF_ARM, "rollout:measure_ours", {**own, "arm": OFF_ARM}, expected_s=200),
        Measurement(OFF_V2, "rollout:measure_ours", {**second, "arm": OFF_V2}, expected_s=200),
    ]
    for arm in (TUNER_V2, DYNAMIC, ADAPTIVE, STATIC_V2, TUNER, STATIC):
        function = "rollout:measure_stock" if arm in (DYNAMIC, ADAPTIVE) else "rollout:measure_ours"
        base = second if arm in (TUNER_V2, STATIC_V2) else own
        for acceptance in [*WANTED][: 1 if settings.small else None]:
            statics = STATICS[acceptance][1:2] if settings.small else STATICS[acceptance]
            for drafts in statics if arm in (STATIC, STATIC_V2) else (0,):
                name = arm_name(acceptance, label(arm, drafts))
                given = {**base, "arm": arm, "acceptance": acceptance, "drafts": drafts}
                found.append(Measurement(name, function, given, expected_s=180 if drafts else 240))
    return found


def make_rollout(given: dict[str, Any], vocab: int) -> Any:
    """The rollout's requests, the same for each arm."""
    from megatron_tlt.bench.rollout_cases import make_cases, pareto_lengths
    from tools.bench.gpu_measure import engines

    count = given["requests"]
    lengths = [*pareto_lengths(count - 1, given["shortest"], given["longest"], 1.1, 0), given["longest"]]
    requests = engines.make_requests(count, PROMPT, lengths, vocab, 1.0)
    return make_cases(requests, (), 1)[0].rollouts[0]


def warm_up(given: dict[str, Any], vocab: int) -> Any:
    """As many short requests: what compiles or allocates at first use is not measured."""
    from tools.bench.gpu_measure import engines

    return engines.make_requests(given["requests"], PROMPT, [16] * given["requests"], vocab, 1.0)


def measure_stock(job: Job) -> None:
    """Stock vLLM's rollout, without speculation or with a head and one of vLLM's own ways to choose its drafts."""
    from tools.bench.gpu_measure import engines, models

    given, target = job.given, job.work / "target"
    arm = given.get("arm", STOCK)
    if arm == ADAPTIVE and (reason := adaptive_unavailable(job.settings)):
        job.emit(arm=arm, acceptance=given["acceptance"], unavailable=reason)
        return
    vocab = models.write_config(target, SHAPE, job.settings)["vocab_size"]
    speculative: dict[str, Any] | None = None
    if arm != STOCK:
        head = models.write_head(job.work / "head", target, job.settings)
        speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": MOST}
        if job.settings.on_gpu:  # vLLM has none on a CPU
            speculative |= engines.acceptance_options(given["acceptance"], MOST)
        if arm == DYNAMIC:
            speculative["num_speculative_tokens_per_batch_size"] = vllm_schedule(given["acceptance"], given["requests"])
        else:
            speculative["enable_adaptive_verification"] = True
    longest = PROMPT + given["longest"] + MOST
    engine = engines.StockVllm(target, job.settings, longest, given["requests"], speculative)
    engine.generate(warm_up(given, vocab))
    requests = make_rollout(given, vocab)
    began = time.perf_counter()
    tokens = engine.generate(requests)
    seconds, acceptance = time.perf_counter() - began, given.get("acceptance")
    job.emit(arm=arm, acceptance=acceptance, seconds=seconds, tokens=tokens, **engine.description)


def adaptive_unavailable(settings: Settings) -> str | None:
    """Why ``ADAPTIVE`` cannot be measured here; None if it can."""
    from vllm.config import SpeculativeConfig

    if "enable_adaptive_verification" not in SpeculativeConfig.__dataclass_fields__:
        return "this release of vLLM has no adaptive verification"
    return None if settings.on_gpu else "adaptive verification is a part of the second model runner, on GPUs"


def vllm_schedule(acceptance: float, requests: int) -> list[tuple[int, int, int]]:
    """A schedule as vLLM takes it: (first batch size, last one, drafts), up to ``requests``."""
    found, first = [], 1
    for last, drafts in (*SCHEDULES[acceptance], (requests, 0)):
        if first <= min(last, requests):
            found.append((first, min(last, requests), drafts))
        first = last + 1
    return found


def measure_ours(job: Job) -> None:
    """An arm of ours; the tuner has two rollouts, in the first of which it has no data."""
    given, arm = job.given, job.given["arm"]
    second, most = arm in (OFF_V2, TUNER_V2, STATIC_V2), given.get("drafts") or MOST
    named = {"arm": label(arm, most), "acceptance": given.get("acceptance")}
    if second and not job.settings.on_gpu and (reason := second_runner.interpret()):
        job.emit(**named, unavailable=reason)
        return
    from megatron_tlt.config.speculation import AdaptiveConfig
    from megatron_tlt.rollout.adaptive import build_controller
    from megatron_tlt.rollout.engine_speculation import EngineSpeculation
    from megatron_tlt.rollout.types import DraftStats
    from megatron_tlt.rollout.vllm_engine import VllmEngine
    from megatron_tlt.speculation.strategy import Strategy
    from tools.bench.gpu_measure import engines, models
    from tools.bench.gpu_measure.replayed_head import ReplayedHead

    runner = "v2" if second else "v1"
    engines.start_process(runner)
    target = job.work / "target"
    vocab = models.write_config(target, SHAPE, job.settings)["vocab_size"]
    head = None if arm in (OFF_ARM, OFF_V2) else models.write_head(job.work / "head", target, job.settings)
    names = ["off", *(f"eagle3-{drafts}" for drafts in (1, 3, 5, 7))]
    tunes = arm in (TUNER, TUNER_V2)
    adaptive = AdaptiveConfig(strategies=names, threshold=given["requests"]) if tunes else None
    section = engines.head_section(head, most, adaptive=adaptive) if head else engines.head_section(None, 0)
    rollout = engines.rollout_config(job.settings, PROMPT, given["longest"], max_num_seqs=given["requests"])
    rollout = rollout.model_copy(update={"model_runner": runner, "async_scheduling": second})
    acceptance = given["acceptance"] if second and head else None
    with engines.set_acceptance(acceptance), second_runner.scheduling(job.settings, second):
        engine = VllmEngine(target, rollout, section, 0)
    models.fill_chain(engine, 1)
    requests, warm = make_rollout(given, vocab), warm_up(given, vocab)
    replays = head is not None and not second
    if replays:
        responses = {
            request.request_id: models.chain_response(request.prompt_token_ids, given["longest"], vocab)
            for request in requests
        }
        ReplayedHead(engine, responses, given["acceptance"])
    if head is not None:
        engine.set_strategy(Strategy("eagle3", most))
    engine.generate(warm)
    chooser = None
    if tunes:
        chooser = EngineSpeculation(section, build_controller(section, given["longest"], 0, given["requests"]))
    for turn in range(2 if chooser else 1):
        began = time.perf_counter()
        if chooser is None:
            responses = engine.generate(requests)
        else:
            chooser.begin_step()
            chooser.begin_rollout(requests)
            responses = engine.generate(requests, on_finished=chooser.finished, chooser=chooser)
            chooser.end_rollout(requests)
            chooser.keep_rollout()
        seconds = time.perf_counter() - began
        stats = sum((response.draft for response in responses), DraftStats())
        job.emit(
            **named,
            turn=turn,
            seconds=seconds,
            tokens=stats.num_tokens,
            acceptance_length=stats.acceptance_length,
            **({"on_chain": on_chain(requests, responses, vocab)} if replays or head is None else {}),
            runner=runner,
            steps=chooser.account.steps if chooser else None,
            cudagraph_mode=str(engine._llm.vllm_config.compilation_config.cudagraph_mode),
        )


def on_chain(requests: Any, responses: Any, vocab: int) -> float:
    """Share of responses that are the chain's: only for these is the acceptance the one that was set."""
    from tools.bench.gpu_measure.models import chain_response

    pairs = zip(requests, responses, strict=True)
    right = [list(b.token_ids) == chain_response(a.prompt_token_ids, len(b.token_ids), vocab) for a, b in pairs]
    return sum(right) / len(right)


def judge(result: BenchmarkResult, rows: Rows) -> None:
    """Ratios of medians over repeats, of each repeat's last rollout."""
    measured = {name: repeats for name, repeats in rows.items() if "unavailable" not in repeats[-1][-1]}
    seconds = {name: statistics.median(repeat[-1]["seconds"] for repeat in each) for name, each in measured.items()}
    chained = [
        row["on_chain"] for repeats in rows.values() for repeat in repeats for row in repeat if "on_chain" in row
    ]
    if chained:
        result.target("responses with the set acceptance", min(chained), "==", 1.0)
    if STOCK not in seconds:
        return
    for arm in (OFF_ARM, OFF_V2):
        if arm in seconds:
            result.target(f"speed of {arm} over stock", seconds[STOCK] / seconds[arm], ">=", 0.98)
    for acceptance, wanted in WANTED.items():
        second = arm_name(acceptance, TUNER_V2)
        if second in seconds:
            name = f"speed over stock on V2, set acceptance {acceptance}, the head's real cost included"
            result.target(name, seconds[STOCK] / seconds[second], ">=", wanted)
        own = [arm_name(acceptance, arm) for arm in (DYNAMIC, ADAPTIVE)]
        if second in seconds and (known := [seconds[name] for name in own if name in seconds]):
            name = f"V2 tuner over vLLM's best own choice at {acceptance}"
            result.target(name, min(known) / seconds[second], ">=", 1.0)
        first = arm_name(acceptance, TUNER)
        if first in seconds:
            name = f"speed over stock, set acceptance {acceptance}, the head's real cost included"
            result.target(name, seconds[STOCK] / seconds[first], ">=", wanted)
        for arm, static in ((TUNER, STATIC), (TUNER_V2, STATIC_V2)):
            tuner = arm_name(acceptance, arm)
            statics = [arm_name(acceptance, label(static, drafts)) for drafts in STATICS[acceptance]]
            if tuner in seconds and all(name in seconds for name in statics):
                best = min(seconds[name] for name in statics)
                result.target(f"{arm} over the best static strategy at {acceptance}", best / seconds[tuner], ">=", 0.95)
