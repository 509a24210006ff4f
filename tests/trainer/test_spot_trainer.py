"""A bubble's life: sessions grow, end, fail and hang, and no rank waits for long. Ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megatron_tlt.checkpoint.files import LATEST
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.loader import load_config
from megatron_tlt.drafter import DrafterState, DrafterTrainer, Entry, SharedWeights, drafter_from_target
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.timeline import SPOT_TRACK
from megatron_tlt.platform.offload import StorageOffload
from megatron_tlt.rollout.recorded_states import RecordedStates
from megatron_tlt.trainer.coordination import check_coordinator_host, coordinator_host
from megatron_tlt.trainer.engine_data import EngineData
from megatron_tlt.trainer.spot_checkpoints import SpotCheckpoints
from megatron_tlt.trainer.spot_trainer import SpotReport, SpotTrainer, newest_rank, spot_metrics
from tests.drafter.conftest import load_target, random_entry, write_target
from tests.helpers.launch import REPOSITORY
from tests.trainer.threads import LIMIT_S, Meeting, ThreadGroup, Threads, copied, until


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target("qwen2-untied", tmp_path_factory.mktemp("target") / "qwen2")


@pytest.fixture(scope="module")
def entries(target: Path) -> list[Entry]:
    model = load_target(target)
    return [random_entry(model, "eagle", 9 + seed % 4, 3, seed) for seed in range(12)]


@pytest.fixture
def threads(target: Path, entries: list[Entry], tmp_path: Path) -> Iterator[Threads]:
    with ExitStack() as stack:
        yield Threads(stack, tmp_path, target, [entries[rank::3] for rank in range(3)])


def latest(checkpoints: Path) -> int:
    try:
        return int((checkpoints / LATEST).read_text().rpartition("-")[2])
    except FileNotFoundError:
        return -1


def same(one: DrafterState, other: DrafterState) -> bool:
    a, b = one.tensors(), other.tensors()
    return one.version == other.version and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_second_rank_joins_and_the_last_ones_release_ends_it(threads: Threads, tmp_path: Path) -> None:
    threads.begin()
    threads.release(0)
    until(lambda: threads.trainers[0].version >= 2)
    threads.release(1)
    until(lambda: threads.trainers[1].version >= threads.trainers[0].version - 1 > 6)
    threads.release(2)
    threads.join(0, 1, 2)
    reports = [bubble.report for bubble in threads.bubbles]
    assert same(threads.trainers[0].state, threads.trainers[1].state)
    assert [report.sessions for report in reports] == [(1,), (1,), ()]
    assert reports[0].version == reports[1].version > 0 == reports[2].version
    assert [report.led for report in reports] == [True, False, False]
    # two members draw as much as one did
    assert reports[0].metrics["sequences"] == threads.batch
    assert threads.took_device == [0, 1]
    until(lambda: threads.bubbles[0]._checkpoints.idle())
    assert 0 < latest(tmp_path / "spot") <= reports[0].version
    metrics = spot_metrics(reports, 0)
    assert 0 < metrics["spot/used_s"] <= metrics["spot/idle_s"] and metrics["spot/steps"] == reports[0].version
    spans = [[e for e in timeline.to_events() if e["track"] == SPOT_TRACK] for timeline in threads.timelines]
    assert [[e["args"]["members"] for e in own] for own in spans] == [[1, 2], [2], []]
    assert sum(e["args"]["steps"] for e in spans[0]) == reports[0].version > spans[1][0]["args"]["steps"] > 0
    assert {e["args"]["ended"] for own in spans for e in own} == {"stopped"}


def test_it_draws_from_the_newest_steps_responses_and_from_older_ones_only_to_fill_up(
    target: Path, entries: list[Entry], tmp_path: Path
) -> None:
    by_step = [[replace(entry, key=f"{step}/{entry.key}", step=step) for entry in entries] for step in range(3)]
    own = [[*by_step[0], *by_step[1], *by_step[2][: 4 * (2 - rank)]] for rank in range(3)]  # 8, 4 and none of step 2
    drawn: dict[int, list[list[int]]] = {0: [], 1: []}
    with ExitStack() as stack:
        threads = Threads(stack, tmp_path, target, own)
        for rank, buffer in enumerate(threads.buffers[:2]):

            def recorded(*given: int, rank: int = rank, sample: Callable[..., list[Entry]] = buffer.sample) -> Any:
                found = sample(*given)
                drawn[rank].append([item.step for item in found])
                return found

            buffer.sample = recorded  # type: ignore[method-assign]
        threads.begin(3)
        threads.release(0, rl_step=3)
        threads.release(1, rl_step=3)
        until(lambda: len(drawn[1]) > 2)
        threads.release(2, rl_step=3)
        threads.join(0, 1, 2)
    assert {len(steps) for steps in drawn[1]} <= {4, 2}
    assert all(sorted(steps) == [2] * len(steps) for steps in drawn[0] + drawn[1])


def test_it_draws_what_its_engine_has_just_ended_beside_earlier_steps(
    target: Path, entries: list[Entry], tmp_path: Path
) -> None:
    newest = [replace(entry, key=f"3/engine/{entry.key}", step=3) for entry in entries]
    with ExitStack() as stack:
        threads = Threads(stack, tmp_path, target, [[replace(entry, step=2) for entry in entries], [], []])
        both, alone, _ = threads.bubbles
        for bubble in (both, alone):
            bubble._rl_step, bubble._newest = 3, newest
        assert sorted(entry.step for entry in both._draw(4)) == [2, 2, 3, 3]
        assert [entry.step for entry in alone._draw(4)] == [3] * 4
        first = [entry.key for entry in both._draw(4)]
        threads.trainers[0].version = 1
        assert [entry.key for entry in both._draw(4)] != first
        both._newest = newest[:1]
        assert sorted(entry.step for entry in both._draw(4)) == [2, 2, 2, 3]


def test_a_session_needs_no_earlier_step(target: Path, entries: list[Entry], tmp_path: Path) -> None:
    """What an engine recorded is enough; whoever never trains never puts it together."""

    def data() -> EngineData:
        recorded = RecordedStates(1 << 24)
        return EngineData(recorded, 0, 1)

    with ExitStack() as stack:
        threads = Threads(stack, tmp_path, target, [[], [], []])
        for bubble in threads.bubbles:
            bubble._data = data()
        threads.begin()
        for bubble in threads.bubbles:
            assert bubble._data is not None
            recorded = bubble._data._recorded
            assert recorded.records
            for entry in entries:
                tokens, prompt = entry.token_ids.tolist(), entry.prompt_length
                recorded.start(entry.key, entry.key, tokens[:prompt])
                recorded.add(entry.hidden, [(entry.key, 0, 0, entry.length)])
                recorded.finish(entry.key, [*tokens[prompt:], 1])
        threads.release(0)
        until(lambda: threads.trainers[0].version >= 2)
        threads.release(1, 2)
        threads.join(0, 1, 2)
        assert [bubble.report.entries for bubble in threads.bubbles] == [len(entries)] * 3
        assert all(bubble._newest is None for bubble in threads.bubbles)
        assert not any(bubble._data._recorded.records for bubble in threads.bubbles if bubble._data is not None)


def test_the_next_bubble_goes_on_on_another_rank_from_the_last_ones_checkpoint(threads: Threads) -> None:
    threads.begin()
    threads.release(0)
    until(lambda: threads.trainers[0].version >= 3)
    threads.release(1, 2)
    threads.join(0, 1, 2)
    threads.bubbles[0].save(1)  # as the trainer does once the rollout is over
    version = threads.trainers[0].version
    until(lambda: threads.bubbles[0]._checkpoints.idle())
    threads.begin(2)
    threads.release(2, rl_step=2)
    until(lambda: threads.trainers[2].version > version)
    threads.release(0, 1, rl_step=2)
    threads.join(0, 1, 2)
    (session,) = (e for e in threads.timelines[2].to_events() if e["track"] == SPOT_TRACK)
    assert session["args"]["steps"] == threads.trainers[2].version - version


def test_a_rank_whose_data_fails_withdraws_and_the_other_goes_on(threads: Threads) -> None:
    def broken(*_: object) -> list[Entry]:
        raise OSError("the disk is gone")

    threads.begin()
    threads.release(0)
    until(lambda: threads.trainers[0].version >= 2)
    threads.buffers[1].sample = broken  # type: ignore[method-assign]
    threads.release(1)
    until(lambda: threads.bubbles[1].report.failed)
    before = threads.trainers[0].version
    until(lambda: threads.trainers[0].version > before + 2)
    threads.release(2)
    threads.join(0, 1, 2)
    reports = [bubble.report for bubble in threads.bubbles]
    assert [report.failed for report in reports] == [0, 1, 0]
    assert threads.trainers[1].version < threads.trainers[0].version


def test_a_rank_with_something_better_to_do_leaves_and_the_others_go_on(threads: Threads) -> None:
    threads.begin()
    threads.release(0)
    until(lambda: threads.trainers[0].version >= 2)
    assert threads.bubbles[0].steps == threads.trainers[0].version > threads.bubbles[1].steps == 0
    enough = threading.Event()
    threads.release(1, is_enough=enough.is_set)
    until(lambda: threads.trainers[1].version > 4)
    enough.set()
    threads.join(1)
    left, before = threads.trainers[1].version, threads.trainers[0].version
    until(lambda: threads.trainers[0].version > before + 2)
    threads.release(2)
    threads.join(0, 2)
    assert threads.trainers[1].version == left < threads.trainers[0].version, "it enters no session any more"
    reports = [bubble.report for bubble in threads.bubbles]
    assert [(report.failed, report.cut_off) for report in reports] == [(0, 0)] * 3
    spans = [[e for e in timeline.to_events() if e["track"] == SPOT_TRACK] for timeline in threads.timelines]
    assert [[e["args"]["members"] for e in own] for own in spans] == [[1, 2, 1], [2], []]
    # the next rollout finds it where the others are
    threads.begin(2)
    threads.release(1, rl_step=2)
    until(lambda: threads.bubbles[1].steps >= 1)
    threads.release(0, 2, rl_step=2)
    threads.join(0, 1, 2)


def test_a_rank_that_no_session_wants_may_do_something_else(threads: Threads) -> None:
    threads.begin()
    idle, now = threads.bubbles[2], threads.timelines[2].now()
    idle._report = SpotReport(released_at=now)
    assert idle.may_train, "an order may come"
    idle._report = SpotReport(released_at=now - 5)
    assert not idle.may_train
    threads.release(0)
    until(lambda: threads.trainers[0].version >= 2)
    assert threads.bubbles[0].may_train, "it trains"
    threads.release(1)
    threads.release(2)
    threads.join(0, 1, 2)
    threads.bubbles[0]._withdraw()
    assert not threads.bubbles[0].may_train


def test_a_member_that_hangs_is_not_waited_for(threads: Threads) -> None:
    go_on, hangs = threading.Event(), threading.Event()
    sample = threads.buffers[1].sample

    def hanging(*given: int) -> list[Entry]:
        if threads.trainers[1].version >= threads.trainers[0].version > 3:
            hangs.set()
            assert go_on.wait(LIMIT_S)
        return sample(*given)

    threads.buffers[1].sample = hanging  # type: ignore[method-assign]
    threads.begin()
    threads.release(0, 1)
    until(hangs.is_set)
    until(lambda: threads.trainers[0].version == threads.trainers[1].version)
    kept = copied(threads.trainers[0].state)
    threads.release(2)
    threads.join(0, 2)
    assert threads.bubbles[0].report.cut_off == 1
    assert same(threads.trainers[0].state, kept), "the last whole step's"
    go_on.set()
    threads.join(1)
    threads.begin(2)  # and all of them may take part in the next one
    threads.release(0, 1, rl_step=2)
    before = threads.trainers[1].version
    until(lambda: threads.trainers[1].version > before + 1)
    threads.release(2, rl_step=2)
    threads.join(0, 1, 2)


def test_what_is_not_finite_leaves_the_last_good_drafter_and_ends_training_until_the_next_rollout(
    threads: Threads, entries: list[Entry], tmp_path: Path
) -> None:
    bad, sample = entries[0], threads.buffers[0].sample

    def poisoned(share: int, step: int, version: int) -> list[Entry]:
        if version < 4:
            return sample(share, step, version)
        return [Entry("bad", 0, bad.token_ids, bad.prompt_length, bad.hidden * float("nan"), 0.0)]

    threads.buffers[0].sample = poisoned  # type: ignore[method-assign]
    threads.begin()
    threads.release(0)
    until(lambda: threads.bubbles[0].report.failed)
    threads.release(1, 2)
    threads.join(0, 1, 2)
    assert threads.bubbles[0].report.failed == 1
    assert same(threads.trainers[0].state, threads.good[0])
    # the third step's checkpoint is not what the next session starts from
    until(lambda: latest(tmp_path / "spot") == 0)


def test_without_its_coordinator_a_rank_just_waits_with_the_others(threads: Threads) -> None:
    threads.begin()
    threads.release(0, 1)
    until(lambda: threads.trainers[1].version >= 2)
    threads.service.close()
    threads.join(0, 1)  # though the third never ends
    assert abs(threads.trainers[0].version - threads.trainers[1].version) <= 1


@pytest.mark.parametrize("members", [2, 3])
def test_who_trains_changes_nothing_but_rounding(members: int, target: Path, entries: list[Entry]) -> None:
    config = DrafterConfig(kind="eagle", lr=1e-2, feature_noise=0.05, max_tokens_per_micro_batch=32)

    def trained(count: int) -> list[DrafterTrainer]:
        trainers = [DrafterTrainer(drafter_from_target(target, "eagle", seed=1), config, 0) for _ in range(count)]
        meeting = Meeting()

        def member(at: int) -> None:
            group = ThreadGroup(range(count), at, meeting) if count > 1 else None
            for step in range(3):
                batch = entries[4 * step : 4 * step + 4]
                assert trainers[at].train_step(batch[at::count], group=group).outcome == "trained"

        running = [threading.Thread(target=member, args=(at,)) for at in range(count)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(LIMIT_S)
        return trainers

    alone, together = trained(1)[0], trained(members)
    assert [trainer.version for trainer in together] == [3] * members
    for trainer in together:
        for name, tensor in alone.state.tensors().items():
            torch.testing.assert_close(trainer.state.tensors()[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_step_that_is_stopped_between_micro_batches_leaves_nothing(target: Path, entries: list[Entry]) -> None:
    config = DrafterConfig(kind="eagle", lr=1e-2, max_tokens_per_micro_batch=16)
    stopped, straight = (DrafterTrainer(drafter_from_target(target, "eagle", seed=1), config, 0) for _ in range(2))
    assert stopped.train_step(entries).outcome == straight.train_step(entries).outcome == "trained"
    asked = iter([False, False, True])
    assert stopped.train_step(entries, lambda: next(asked)).outcome == "stopped"
    assert next(asked, None) is None and same(stopped.state, straight.state)
    stopped.train_step(entries[:3])
    straight.train_step(entries[:3])
    assert same(stopped.state, straight.state)


def test_a_checkpoint_is_taken_over_only_where_it_is_newer(target: Path, entries: list[Entry], tmp_path: Path) -> None:
    config = DrafterConfig(kind="eagle", lr=1e-2)
    writer, reader = (DrafterTrainer(drafter_from_target(target, "eagle", seed=seed), config, 0) for seed in (1, 2))
    saves, looks = (SpotCheckpoints(tmp_path / "spot", 2, trainer) for trainer in (writer, reader))
    assert not looks.take_over()
    for _ in range(3):
        writer.train_step(entries[:2])
        saves.step_done(rl_step=7)
    saves.close(LIMIT_S)
    assert looks.take_over() and reader.version == 2  # the third is lost
    assert not looks.take_over()
    (tmp_path / "spot" / LATEST).write_text("version-000000009")  # names what is not there
    assert not looks.take_over() and reader.version == 2


def test_training_goes_on_bit_for_bit_where_its_memory_was_given_up_meanwhile(
    target: Path, entries: list[Entry]
) -> None:
    config, memory = DrafterConfig(kind="eagle", lr=1e-2), StorageOffload()
    away, straight = (DrafterTrainer(drafter_from_target(target, "eagle", seed=1), config, 0) for _ in range(2))
    shared = away.model.shared
    away.model.share(SharedWeights(shared.embedding.clone(), shared.head.clone()))  # a file's pages cannot be freed
    for parameter in away.model.parameters():
        parameter.data = parameter.data.clone()
    for trainer in (away, straight):
        trainer.train_step(entries[:4])
    away.drop_gradients()
    freed, left = memory.offload(away.held), sum(tensor.untyped_storage().nbytes() for tensor in away.held)
    assert (freed, left) == (sum(tensor.nbytes for tensor in straight.held), 0)
    memory.reload()
    for trainer in (away, straight):
        trainer.train_step(entries[4:])
    assert same(away.state, straight.state)
    parameters = sum(tensor.nbytes for tensor in straight.state.parameters.values())
    counters = sum(tensor.nbytes for tensor in straight.state.optimizer.values() if tensor.dim() == 0)
    # beside what is held: gradients, and the copy that a step goes back to
    assert straight.needed_bytes == sum(tensor.nbytes for tensor in straight.held) - counters + 2 * parameters


def test_metrics_of_all_ranks() -> None:
    reports = [
        SpotReport(7, 10.0, 16.25, 4.0, (1, 2), refused=3, metrics={"loss": 1.0}),
        SpotReport(7, 12.0, 13.0, 1.0, (1,), failed=1, refused=1, unsaved=2, dropped=3),
        SpotReport(2, 16.0, led=True),
    ]
    assert newest_rank(reports) == 0 and newest_rank(reports[::-1]) == 1
    assert newest_rank([reports[0], replace(reports[1], led=True)]) == 1
    assert spot_metrics(reports, 2) == {
        "spot/idle_s": 10.0,
        "spot/used_s": 4.75,  # of 5 s, a quarter of one beyond the end
        "spot/share": 0.475,
        "spot/sessions": 2.0,
        "spot/steps": 5.0,
        "spot/preempt_ms": 250.0,
        "spot/failed": 1.0,
        "spot/cut_off": 0.0,
        "spot/refused_messages": 4.0,
        "spot/failed_checkpoints": 2.0,
        "spot/dropped_states": 3.0,
    }
    assert spot_metrics([SpotReport(released_at=3.0)], 0)["spot/share"] == 0.0


def test_a_budget_that_is_too_small_is_refused_with_what_is_needed(threads: Threads, tmp_path: Path) -> None:
    config, trainer = threads.config.model_copy(update={"memory_gib": 1e-6}), threads.trainers[0]
    unused = cast(Any, None)
    with pytest.raises(
        ConfigError, match=rf"spot.memory_gib: found 1e-06; allowed: above {trainer.needed_bytes / 2**30:.3g}"
    ):
        SpotTrainer(config, trainer, unused, unused, unused, global_batch=1, last_good=unused, take_device=unused)


def test_the_coordinator_listens_where_all_ranks_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert coordinator_host(None, 1) == "127.0.0.1"
    assert coordinator_host("10.1.2.3", 8) == "10.1.2.3"
    with pytest.raises(
        ConfigError, match=r"spot.host: not given, and MASTER_ADDR, 'localhost', is 127.0.0.1 on rank 0"
    ):
        coordinator_host(None, 8)
    quickstart = REPOSITORY / "launch" / "quickstart-cpu.yaml"
    nodes = load_config(quickstart, ["launcher.nnodes=2", "launcher.nproc_per_node=1"])
    with pytest.raises(ConfigError, match=r"spot\.host: not given"):
        check_coordinator_host(nodes)
    monkeypatch.setenv("MASTER_ADDR", "10.4.5.6")
    check_coordinator_host(nodes)
    assert coordinator_host(None, 8) == "10.4.5.6"
