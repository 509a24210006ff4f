"""All metrics of ``metrics.jsonl``: unit, meaning, and the names that verl, slime and TRL use for them.

``<...>`` in a name stands for any text. A custom loss adds metrics ``actor/<name>`` (``algorithms/losses.py``).
The other libraries' names were read from verl 0.9.1, slime of August 2026 and TRL 0.25. Where a library averages over
sequences instead of tokens, its name stands for the closest metric here, and the value is the one defined here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Metric(NamedTuple):
    """Unit (empty: a plain number), meaning, and other libraries' names, separated by spaces."""

    unit: str
    meaning: str
    verl: str = ""
    slime: str = ""
    trl: str = ""


M = Metric
METRICS: dict[str, Metric] = {
    "step": M("", "optimizer steps done; 0 is the evaluation before the first step", "training/global_step"),
    "wall_time": M("s", "Unix time at which the row was written"),
    # reward
    "reward/mean": M(
        "", "reward, over all responses", "critic/score/mean critic/rewards/mean", "rollout/raw_reward", "reward"
    ),
    "reward/std": M("", "standard deviation of the reward, over all responses"),
    "reward/group_std": M(
        "", "sample standard deviation of the reward within a group, mean over groups", trl="reward_std"
    ),
    "reward/min": M("", "lowest reward", "critic/score/min critic/rewards/min"),
    "reward/max": M("", "highest reward", "critic/score/max critic/rewards/max"),
    "reward/correct": M("share", "responses that the verifier accepts"),
    "reward/mixed_groups": M("share", "groups whose rewards differ; only these contribute a gradient"),
    "reward/extracted": M("share", "responses in which the verifier found an answer"),
    "reward/late": M(
        "responses", "responses that count as wrong as their verdict took longer than adaptive_timeout allows"
    ),
    "reward/verifier_errors": M("responses", "responses whose verification failed"),
    "reward/verifier_error_share": M("share", "responses whose verification failed"),
    "advantage/mean": M("", "advantage, mean over response tokens", "critic/advantages/mean", "rollout/advantages"),
    "advantage/std": M("", "standard deviation of the advantage, over response tokens"),
    "advantage/min": M("", "lowest advantage", "critic/advantages/min"),
    "advantage/max": M("", "highest advantage", "critic/advantages/max"),
    "eval/pass_at_1": M("share", "sampled responses that are correct, mean over held-out problems"),
    "eval/pass_at_k": M("share", "held-out problems with at least one correct sample"),
    "eval/greedy": M("share", "held-out problems whose greedy response is correct"),
    "eval/maj_at_k": M("share", "held-out problems whose most frequent answer among the samples is correct"),
    "eval/best_of_k": M("", "highest reward among the samples, mean over held-out problems"),
    "eval/<set>/<figure>": M("", "the same figures on a data set of evaluation.sets"),
    "reward/kl": M("nats", "estimate of the KL to the reference, sum over a response, with kl.placement reward"),
    "curriculum/<task>_weight": M("share", "problems of this task in the next step, with trainer.curriculum"),
    "curriculum/<task>_pass_rate": M("share", "moving average of the correct responses to its problems"),
    "sampling/generations": M("", "rollouts of the step, with dynamic sampling"),
    "tail/long_round": M("", "1 if the round decoded problems that others had left, else 0"),
    "tail/deferred": M("", "problems that wait for a long round, after the step"),
    "tail/continued": M("", "share of the step's response tokens that earlier policies sampled"),
    "tail/staleness": M("", "RL steps since the oldest of these tokens"),
    "tail/wasted": M("", "share of the round's response tokens that the step does not train on"),
    "tail/kept_over_all": M(
        "", "mean length of the responses kept over that of all, aborted ones as long as they were: the bias, or less"
    ),
    "sampling/problems_drawn": M("", "problems drawn for the step, used or not"),
    "stream/share": M("", "share of the step's tokens whose gradient was accumulated before the rollout was over"),
    "stream/busy_s": M("s", "of all ranks, from the begin to the end of accumulating in the bubble"),
    "stream/ranks": M("", "ranks that accumulated in the bubble"),
    # lengths and tokens
    "length/mean": M(
        "tokens", "response length", "response_length/mean", "rollout/response_len/mean", "completions/mean_length"
    ),
    "length/median": M("tokens", "median response length", slime="rollout/response_len/median"),
    "length/min": M(
        "tokens", "shortest response", "response_length/min", "rollout/response_len/min", "completions/min_length"
    ),
    "length/max": M(
        "tokens", "longest response", "response_length/max", "rollout/response_len/max", "completions/max_length"
    ),
    "length/truncated": M(
        "share",
        "responses that end at the length limit",
        "response_length/clip_ratio",
        "rollout/truncated_ratio",
        "completions/clipped_ratio",
    ),
    "length/prompt_mean": M("tokens", "prompt length, over responses", "prompt_length/mean"),
    "length/prompt_min": M("tokens", "shortest prompt", "prompt_length/min"),
    "length/prompt_max": M("tokens", "longest prompt", "prompt_length/max"),
    "tokens/step": M("tokens", "prompt and response tokens of the step", "perf/total_num_tokens"),
    "tokens/seen": M("tokens", "prompt and response tokens of all steps, a prompt once per response", trl="num_tokens"),
    "tokens/per_s_per_device": M("tokens/s", "tokens/step over time/total and devices", "perf/throughput"),
    # one task; the keys mean what they mean for all tasks
    "task/<task>/responses": M("responses", "responses to problems of this task"),
    "task/<task>/reward": M("", "mean reward"),
    "task/<task>/correct": M("share", "responses that the verifier accepts"),
    "task/<task>/extracted": M("share", "responses in which the verifier found an answer"),
    "task/<task>/mixed_groups": M("share", "groups whose rewards differ"),
    "task/<task>/length_mean": M("tokens", "response length"),
    "task/<task>/length_max": M("tokens", "longest response"),
    "task/<task>/truncated": M("share", "responses that end at the length limit"),
    "task/<task>/turns": M("", "turns per response, of a task with an environment"),
    "task/<task>/said": M("share", "response tokens that the policy said; the others are the environment's"),
    "task/<task>/environment_errors": M("share", "responses that an error or time limit of the environment ended"),
    "task/<task>/entropy": M("nats", "entropy per response token that is trained on, before the update"),
    "task/<task>/eval_pass_at_1": M("share", "eval/pass_at_1 of this task's held-out problems"),
    # time
    "time/total": M(
        "s", "the step, without evaluation", "timing_s/step perf/time_per_step", "perf/step_time", "step_time"
    ),
    "time/rollout": M("s", "decoding, until the slowest rank ends", "timing_s/gen", "perf/rollout_time"),
    "time/idle": M("s", "waiting for the slowest rank during the rollout, mean over ranks"),
    "time/reward": M("s", "waiting for verifiers after decoding", "timing_s/reward"),
    "time/log_probs": M(
        "s", "log-probabilities of the actor and the reference", "timing_s/old_log_prob", "perf/log_probs_time"
    ),
    "time/update": M("s", "forward, backward and optimizer", "timing_s/update_actor", "perf/actor_train_time"),
    "time/drafter": M("s", "drafter training after the update"),
    "time/reshard": M(
        "s",
        "weights from the actor to the engines, including checks",
        "timing_s/update_weights",
        "perf/update_weights_time",
    ),
    "time/checkpoint": M("s", "saving, as far as training waits", "timing_s/save_checkpoint", "perf/save_model_time"),
    "time/evaluate": M("s", "held-out evaluation", "timing_s/testing"),
    "time/snapshot": M("s", "copying the state to host memory (elastic)"),
    "elastic/devices": M("", "ranks of the step (elastic.min_devices)"),
    "checkpoint/background_s": M("s", "writing the last checkpoint in the background"),
    "checkpoint/verified": M("", "1 if the newest checkpoint that was read again is intact, 0 if it is damaged"),
    "integrity/replicas_ms": M("ms", "comparison of the replicas' weights"),
    "integrity/odd_ranks": M("ranks", "ranks whose weights differ from their replicas', or may"),
    "transition/to_actor_ms": M("ms", "engine to sleep, actor onto the device; slowest rank"),
    "transition/to_drafter_ms": M("ms", "from the end of a rank's rollout to drafter training; slowest rank"),
    "transition/to_engines_ms": M("ms", "time/reshard of the slowest rank"),
    # update
    "actor/loss": M("", "loss per response token", "actor/pg_loss", "train/loss train/pg_loss", "loss"),
    "actor/grad_norm": M("", "gradient norm before clipping", "", "train/grad_norm", "grad_norm"),
    "actor/router_agreement": M("", "share of (token, layer) whose experts the actor would have chosen too"),
    "actor/lr": M("", "learning rate", "", "train/lr-pg_0", "learning_rate"),
    "actor/entropy": M(
        "nats", "entropy per response token, during the update", "actor/entropy_loss", "train/entropy_loss", "entropy"
    ),
    "actor/clip_fraction": M(
        "share",
        "response tokens without gradient because of the clip",
        "actor/pg_clipfrac",
        "train/pg_clipfrac",
        "clip_ratio/region_mean",
    ),
    "actor/clip_fraction_low": M("share", "of these, ratio below 1 - clip_low", trl="clip_ratio/low_mean"),
    "actor/clip_fraction_high": M("share", "of these, ratio above 1 + clip_high", trl="clip_ratio/high_mean"),
    "actor/policy_kl": M(
        "nats", "mean log-probability before the step minus that during the update (k1)", "actor/ppo_kl", "train/ppo_kl"
    ),
    "actor/kl": M(
        "nats",
        "estimate of the KL to the reference per token, with kl.coefficient",
        "actor/kl_loss",
        "train/kl_loss",
        "kl",
    ),
    "actor/dual_clip_fraction": M("share", "response tokens whose loss dual_clip bounds"),
    "actor/opsm_fraction": M("share", "response tokens left out by correction.opsm_delta"),
    "guard/skipped": M("", "updates of the step that were skipped, with a guard section"),
    "guard/went_back": M("", "how often the run has gone back to a checkpoint"),
    "guard/slowest_rank_ratio": M("", "time per token of the slowest rank over the median, in its slowest phase"),
    "correction/weight_mean": M("", "importance weight of a response token"),
    "correction/zero_weight_share": M("share", "response tokens outside of token_bounds"),
    "correction/rejected_token_share": M("share", "response tokens of rejected responses"),
    "correction/rejected_share": M("share", "responses left out of the loss"),
    "rollout/entropy": M("nats", "entropy per response token that is trained on, before the update"),
    "mismatch/mean_abs": M(
        "nats",
        "|actor - rollout| log-probability per token",
        "",
        "train/train_rollout_logprob_abs_diff",
        "sampling/sampling_logp_difference/mean",
    ),
    "mismatch/max_abs": M("nats", "the same, largest of any token", trl="sampling/sampling_logp_difference/max"),
    "mismatch/stale_k3_kl": M("nats", "the same estimate, of tokens that earlier policies sampled"),
    "mismatch/k3_kl": M("nats", "k3 estimate of KL(rollout || actor) per token", "rollout_corr/k3_kl"),
    # rollout and speculation
    "rollout/tokens_per_s": M("tokens/s", "generated tokens of all ranks over time/rollout"),
    "speculation/acceptance_length": M(
        "tokens",
        "tokens per decode step and request; 1 is no gain",
        "rollout/spec_accept_length",
        "rollout/spec_accept_length",
    ),
    "speculation/draft_tokens": M("tokens", "draft tokens verified"),
    "speculation/accepted_tokens": M("tokens", "draft tokens accepted"),
    "speculation/accepted_at_<position>": M("share", "drafts accepted up to this position"),
    "speculation/acceptance_length_<class>": M(
        "tokens", "of short, medium, long responses (thirds); of a source of drafts: tokens per verification"
    ),
    "speculation/drafter_version": M("steps", "optimizer steps of the drafter that drafted"),
    "speculation/drafter_withheld": M("", "1: an untrained drafter was not used"),
    "speculation/share_<strategy>": M("share", "engine steps with this strategy"),
    "speculation/gate_open": M("share", "engine steps whose batch was small enough for speculation"),
    "speculation/switches": M("", "changes of strategy per engine"),
    "speculation/switch_ms": M("ms", "time to choose a strategy, per change"),
    "speculation/catch_up_ms": M("ms", "a head computing tokens that it skipped, per engine"),
    "speculation/gain": M("", "estimated rollout time without speculation over measured time"),
    "speculation/gain_engine_<index>": M("", "the same of one engine"),
    "speculation/gain_coverage": M("share", "time without speculation at batches near measured ones"),
    "speculation/rollout_s": M("s", "decoding of the slowest engine"),
    "speculation/plain_rollout_s": M("s", "estimate of the same without speculation"),
    "speculation/<drafter>_mib": M("MiB", "memory of a model-free drafter on a rank"),
    "speculation/warnings": M("", "active warnings about an unused drafter"),
    "learning/warnings": M("", "active warnings about a cause that prevents learning"),
    # drafter training
    "drafter/version": M("steps", "optimizer steps of the newest drafter"),
    "drafter/steps": M("steps", "optimizer steps of the drafter in this RL step"),
    "drafter/loss": M("", "loss of drafter training"),
    "drafter/distribution_loss": M("nats", "its part for the distribution of the next token"),
    "drafter/regression_loss": M("", "its part for the hidden states"),
    "drafter/loss_depth_<depth>": M("nats", "distribution loss at this position of the draft"),
    "drafter/acceptance_depth_<depth>": M("share", "expected acceptance at this position, on the training data"),
    "drafter/acceptance_length": M("tokens", "expected acceptance length on the training data"),
    "drafter/frozen_acceptance_length": M("tokens", "teacher-forced, of the drafter from the start of the run"),
    "drafter/adapted_acceptance_length": M("tokens", "the same of the newest drafter, on the same responses"),
    "drafter/grad_norm": M("", "gradient norm before clipping"),
    "drafter/lr": M("", "learning rate"),
    "drafter/drafts": M("", "drafts trained on"),
    "drafter/sequences": M("responses", "responses trained on"),
    "drafter/entries": M("responses", "responses in a rank's buffer"),
    "drafter/buffer_mib": M("MiB", "a rank's buffer"),
    "drafter/dropped": M("responses", "responses that the buffer dropped"),
    "drafter/failed": M("", "1: training failed and was undone"),
    # drafter training while other ranks decode
    "spot/idle_s": M("s", "time that ranks waited for the last rollout, sum over ranks"),
    "spot/used_s": M("s", "of this, time in drafter training"),
    "spot/share": M("share", "used of idle time"),
    "spot/sessions": M("", "training sessions"),
    "spot/steps": M("steps", "optimizer steps in them"),
    "spot/preempt_ms": M("ms", "from the end of the rollout until the last rank left training"),
    "spot/entries": M("responses", "responses that waiting ranks could train on"),
    "spot/ready_s": M("s", "time in which enough ranks waited"),
    "spot/untrained": M("", "1: the drafter was not trained"),
    "spot/untrained_<reason>": M("", "1: why"),
    "spot/failed": M("", "sessions that failed"),
    "spot/cut_off": M("", "ranks that lost the coordinator"),
    "spot/refused_messages": M("", "messages without a valid signature"),
    "spot/failed_checkpoints": M("", "drafter checkpoints that could not be written"),
    "spot/dropped_states": M("responses", "responses whose hidden states were dropped"),
    # resharding and memory
    "reshard/tensors": M("", "tensors sent to the engines"),
    "reshard/verified_tensors": M("", "of these, the number that every engine verified"),
    "reshard/sent_mib": M("MiB", "from rank to rank, including checksums"),
    "reshard/copied_mib": M("MiB", "copied within ranks"),
    "reshard/lower_bound_mib": M("MiB", "what ranks need and do not hold"),
    "reshard/staging_mib": M("MiB", "buffers on the rank with the most"),
    "reshard/wake_s": M("s", "waking the engine"),
    "reshard/transfer_s": M("s", "transfer, including checks"),
    "memory/peak_gib": M("GiB", "peak, sum over ranks: on CPUs resident memory, else device memory"),
    "memory/<phase>_gib": M(
        "GiB", "highest during this phase, on the rank with the most; start: building models and engine"
    ),
}

_UNKNOWN = Metric("", "")
_PATTERNS = {
    name: re.compile("(.+)".join(map(re.escape, re.split("<[a-z]+>", name)))) for name in METRICS if "<" in name
}


def find_metric(name: str) -> str | None:
    """The key of METRICS that documents the metric ``name``; None if there is none."""
    if name in METRICS:
        return name
    return next((key for key, pattern in _PATTERNS.items() if pattern.fullmatch(name)), None)


def aliases_of(values: Mapping[str, float], libraries: Sequence[str]) -> dict[str, float]:
    """The metrics in ``values`` again, under the names that ``libraries`` (verl, slime, trl) use for them."""
    return {
        alias: value
        for name, value in values.items()
        for library in libraries
        for alias in getattr(METRICS.get(name, _UNKNOWN), library).split()
    }
