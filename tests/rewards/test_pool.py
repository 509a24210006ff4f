"""The pool: any order, hangs cut off, failures counted, dead workers replaced, nothing left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_tlt.bench.fault_parts import wild
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards import VERIFIERS, RewardPool
from megatron_tlt.rewards.limits import AdaptiveLimits
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks import GENERATORS, Problem, build_sources

#: Really hangs: Python computes 9 ** (9 ** (9 ** 9)) in one C call that no Python signal handler can interrupt.
ENDLESS = "it is 9**9**9**9"


def _math(answer: str, uid: str = "p") -> Problem:
    return Problem(uid=uid, source="s", prompt="?", answer=answer, verifier="math")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _pids(pool: RewardPool) -> list[int]:
    return [worker.pid for worker in pool._active.values()]


def test_rewards_equal_direct_verification_in_any_order_and_failures_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems = build_sources([TaskConfig(name=name) for name in sorted(GENERATORS)], "train", 0).problems(0, 60)
    jobs = [(p.uid, p, p.solution if i % 3 else "#### 5") for i, p in enumerate(problems)]
    expected = {uid: VERIFIERS[p.verifier](p, text or "") for uid, p, text in jobs}
    assert 0 < sum(reward.correct for reward in expected.values()) < len(expected)
    with RewardPool(workers=2, timeout_s=20.0, verifiers=["reasoning_gym"]) as pool:
        for order in (jobs, jobs[::-1]):
            for uid, problem, text in order:
                pool.submit(uid, problem, text or "")
            assert pool.collect() == expected
        assert pool.collect() == {} and pool.pending == 0
        assert (pool.counts.verified, pool.counts.errors) == (2 * len(jobs), 0)

        broken = Problem("the-uid", "s", "?", "1", "reasoning_gym", {"dataset": "no_such_dataset", "entry": {}})
        before = _pids(pool)
        with caplog.at_level(logging.WARNING):
            pool.submit(1, broken, "#### 1")
            raised = pool.collect()[1]
        assert raised.value == 0.0 and "no_such_dataset" in (raised.error or "")
        assert (pool.counts.errors, pool.counts.timeouts, pool.counts.deaths) == (1, 0, 0)
        assert _pids(pool) == before  # raising costs no process
    assert "reasoning_gym failed on the-uid" in caplog.text


def test_a_hang_is_cut_off_a_death_survived_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with RewardPool(workers=1, timeout_s=4.0, verifiers=["math"]) as pool, caplog.at_level(logging.WARNING):
        pool.submit("warm", _math("1"), "#### 1.0")
        assert pool.collect()["warm"].correct
        hanging = _pids(pool)[0]
        pool.submit("hang", _math("72", "the-uid"), ENDLESS)
        pool.submit("after", _math("72"), r"#### \frac{144}{2}")
        rewards = pool.collect()
        assert rewards["hang"].value == 0.0 and rewards["hang"].error == "no answer within 4 s"
        assert rewards["after"].correct
        assert (pool.counts.timeouts, pool.counts.errors, pool.counts.deaths) == (1, 0, 0)
        assert "math failed on the-uid" in caplog.text
        replacement = _pids(pool)[0]
        assert not _alive(hanging) and _alive(replacement)

        os.kill(replacement, signal.SIGKILL)
        pool.submit("dead", _math("1"), "#### 1")
        pool.submit("alive", _math("1"), "#### 1")
        rewards = pool.collect()
        assert rewards["dead"].value == 0.0 and "exit status -9" in (rewards["dead"].error or "")
        assert rewards["alive"].correct
        assert (pool.counts.timeouts, pool.counts.errors, pool.counts.deaths) == (1, 0, 1)


def test_a_problem_with_a_correct_response_soon_gives_up_on_others() -> None:
    with RewardPool(workers=1, timeout_s=60.0, verifiers=["math"], adaptive=True) as pool:
        pool.submit("right", _math("72", "known"), "#### 72")
        assert pool.collect()["right"].correct
        began = time.monotonic()
        pool.submit("hang", _math("72", "known"), ENDLESS)
        pool.submit("after", _math("72", "known"), "#### 72")
        rewards = pool.collect()
        assert time.monotonic() - began < 50
        assert rewards["hang"] == Reward(0.0, correct=False, late=True), "wrong, and no error"
        assert rewards["after"].correct and (pool.counts.late, pool.counts.timeouts) == (1, 0)


def test_an_evaluation_waits_as_long_as_the_config_says() -> None:
    with RewardPool(workers=1, timeout_s=4.0, verifiers=["math"], adaptive=True) as pool:
        pool.submit("right", _math("72", "known"), "#### 72")
        assert pool.collect()["right"].correct
        with pool.full_time():
            pool.submit("hang", _math("72", "known"), ENDLESS)
            hung = pool.collect()["hang"]
        assert not hung.late and "4" in (hung.error or ""), "the configured limit, not the adaptive one of 2 s"
        pool.submit("again", _math("72", "known"), ENDLESS)
        assert pool.collect()["again"].late, "training goes on with adaptive limits"


def test_limits_follow_the_slowest_correct_verdict() -> None:
    limits = AdaptiveLimits(10.0)
    assert limits.limit("a") == 10
    limits.judged_correct("a", 0.1)
    assert limits.limit("a") == 2 and limits.limit("b") == 10
    limits.judged_correct("a", 4.0)
    limits.judged_correct("a", 3.0)
    assert limits.limit("a") == 6
    limits.judged_correct("a", 9.0)
    assert limits.limit("a") == 10


def test_wrong_use_is_refused_and_closing_ends_busy_workers_at_once() -> None:
    with pytest.raises(ConfigError, match="unknown verifier 'maths'; allowed are code, math, procedural"):
        RewardPool(workers=1, timeout_s=1.0, verifiers=["maths"])
    pool = RewardPool(workers=1, timeout_s=60.0, verifiers=["math"])
    pool.submit(0, _math("1"), "#### 1")
    with pytest.raises(ValueError, match="key 0 is in use"):
        pool.submit(0, _math("1"), "#### 1")
    with pytest.raises(ConfigError, match=r"problem u: verifier 'reasoning_gym' is not loaded.*allowed are math"):
        pool.submit(1, Problem("u", "s", "?", "1", "reasoning_gym"), "")
    assert pool.collect()[0].correct
    pids = _pids(pool)
    pool.submit(1, _math("1"), ENDLESS)
    time.sleep(0.5)
    began = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - began < 10.0
    assert not any(map(_alive, pids))
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(2, _math("1"), "#### 1")


def test_workers_do_not_outlive_a_killed_parent() -> None:
    code = (
        "import sys, time\n"
        "from megatron_tlt.rewards import RewardPool\n"
        "pool = RewardPool(1, 20.0, ['math'])\n"
        "print(pool._active[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert _alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30.0
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(worker)


def test_a_worker_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "import megatron_tlt.rewards.worker\n"
        "from megatron_tlt.rewards.verifiers import VERIFIERS, load_verifier\n"
        "[load_verifier(name) for name in VERIFIERS]\n"
        "print(sorted({'torch', 'vllm', 'megatron', 'transformers'} & set(sys.modules)))\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "[]"


def test_a_verifier_that_reads_or_closes_its_standard_input_takes_nobody_elses_job() -> None:
    problem = Problem(uid="p", source="s", prompt="", answer="", verifier=wild.PATH)
    with RewardPool(workers=1, timeout_s=20.0, verifiers=[wild.PATH]) as pool:
        for key, response in enumerate(["good", "read", "good", "close", "good"]):
            pool.submit(key, problem, response)
        found = pool.collect()
        assert {key for key, reward in found.items() if reward.correct} == {0, 2, 4}
        assert pool.counts.deaths == pool.counts.timeouts == 0
