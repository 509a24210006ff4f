"""Which nodes take part in a start of a run that lost some, and with which config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.cli.elastic_launch import ElasticNodes
from megatron_tlt.cli.launch import LaunchStart
from megatron_tlt.config.loader import dump_resolved, load_config, load_resolved
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.shipped import LAUNCH
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.planning.job import job_of
from megatron_tlt.platform.membership import LaunchMember, LaunchRound, RoundEnd, leave_out


def config_of(folder: Path, *overrides: str, name: str = "qwen2.5-32b-4n8g") -> TltConfig:
    given = [f"run.dir={folder}", "elastic.min_devices=8", *overrides]
    return load_config(LAUNCH / f"{name}.yaml", given, check_libraries=False)


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in ("cli.elastic_launch", "planning.devices"):
        monkeypatch.setattr(f"megatron_tlt.{module}.visible_gpus", lambda: count)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 8)
    for name, value in (("RENDEZVOUS", "127.0.0.1:29400"), ("NODE_RANK", "0"), ("JOB", "7.0")):
        monkeypatch.setenv(f"TLT_{name}", value)


def members(*devices: int) -> list[LaunchMember]:
    return [LaunchMember(index, f"10.0.0.{index}", count) for index, count in enumerate(devices) if count]


def chosen(config: TltConfig, folder: Path, *devices: int) -> tuple[list[int], TltConfig]:
    used, text = ElasticNodes(config)._choose(members(*devices))
    path = folder / "chosen.yaml"
    path.write_text(text)
    return [member.index for member in used], load_resolved(path)


def test_with_all_devices_it_is_the_runs_own_config(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    used, found = chosen(config, tmp_path, 8, 8, 8, 8)
    assert used == [0, 1, 2, 3] and found == config


@pytest.mark.parametrize(("devices", "used"), [((0, 8, 8, 8), {1, 2, 3}), ((8, 0, 0, 8), {0, 3})])
def test_with_fewer_the_layout_fits_and_batch_and_groups_stay(
    devices: tuple[int, ...], used: set[int], tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    took, found = chosen(config, tmp_path, *devices)
    assert set(took) <= used and found.launcher.world_size == len(took) * found.launcher.nproc_per_node
    before, now = job_of(config), job_of(found)
    assert now.world < before.world
    assert (now.prompts, now.responses, now.mini_batches) == (before.prompts, before.responses, before.mini_batches)
    layout, own = now.actor.layout, before.actor.layout
    assert (layout.tp, layout.cp, layout.ep, now.engine.tp) == (own.tp, own.cp, own.ep, before.engine.tp)
    unchanged = {"launcher", "actor", "spot"}
    a, b = config.model_dump(mode="json"), found.model_dump(mode="json")
    assert {key for key in a if a[key] != b[key]} <= unchanged
    a["actor"].pop("megatron"), b["actor"].pop("megatron")
    assert a["actor"] == b["actor"]


def test_a_strict_launch_keeps_its_logical_shards_and_chooses_layouts_that_keep_the_bits(tmp_path: Path) -> None:
    off = ("actor.ddp.overlap_grad_reduce=false", "actor.ddp.overlap_param_gather=false")
    config = config_of(tmp_path, "elastic.strict=true", *off)
    whole = job_of(config).actor
    assert whole.logical_shards == whole.layout.dp
    _, found = chosen(config, tmp_path, 8, 8, 8)
    actor = job_of(found).actor
    assert actor.layout.dp in (1, 2, 4) and actor.layout.dp <= whole.layout.dp
    assert actor.logical_shards == whole.logical_shards and actor.layout.vpp is None


def test_too_few_devices_are_refused_with_what_was_found(tmp_path: Path) -> None:
    elastic = ElasticNodes(config_of(tmp_path, "elastic.min_devices=24"))
    with pytest.raises(
        ConfigError, match=r"min_devices: found \d+ usable devices \(8 on node 1, 8 on node 2\); allowed: at least 24"
    ):
        elastic._choose(members(0, 8, 8))


def test_a_node_that_is_left_out_has_a_part_only_if_the_others_do_not_suffice(tmp_path: Path) -> None:
    elastic = ElasticNodes(config_of(tmp_path, "elastic.min_devices=16"))
    folder = tmp_path / "logs" / "members" / "7.0"
    folder.mkdir(parents=True)
    leave_out(folder, [1])
    used, _ = elastic._choose(members(8, 8, 8, 8))
    assert {member.index for member in used} <= {0, 2, 3}
    used, _ = elastic._choose(members(8, 8, 0, 0))
    assert [member.index for member in used] == [0, 1]


def test_a_launch_needs_a_name_and_no_more_devices_than_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"elastic.min_devices: found 33; allowed: at most 32"):
        config_of(tmp_path, "elastic.min_devices=33")
    config = config_of(tmp_path)
    monkeypatch.delenv("TLT_JOB")
    with pytest.raises(ConfigError, match=r"TLT_JOB: not set, and elastic.min_devices is"):
        ElasticNodes(config)


def test_a_place_pays_if_enough_of_the_run_is_left(tmp_path: Path) -> None:
    """Half the devices before, all after: a change of 60 s pays in a long run, not shortly before its end."""
    config = config_of(tmp_path, "elastic.reconfigure_s=60", "trainer.steps=100")
    elastic = ElasticNodes(config)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time/total": 50.0}) + "\n")
    assert elastic._seconds_left() == 99 * 50.0


def test_the_layout_is_searched_once_for_the_same_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = ElasticNodes(config_of(tmp_path, "elastic.reconfigure_s=60", "trainer.steps=1000"))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time/total": 50.0}) + "\n")
    searches, best = [], elastic._best
    monkeypatch.setattr(elastic, "_best", lambda devices: (searches.append(list(devices)), best(devices))[1])
    with elastic.open():
        membership = elastic._membership
        assert membership is not None
        for number, nodes in enumerate((members(0, 8, 8), members(0, 8, 8, 8))):
            monkeypatch.setattr(membership, "newest", lambda n=number, m=nodes: LaunchRound(n, tuple(m)))
            paid = [elastic._pays() for _ in range(3)]
            assert paid == [paid[0]] * 3
    assert searches == [[8, 8], [8, 8, 8], [8, 8, 8], [8, 8, 8, 8]] and paid[0]


def started(elastic: ElasticNodes, number: int, *devices: int) -> tuple[TltConfig, LaunchStart]:
    used, text = elastic._choose(members(*devices))
    start = elastic._start(LaunchRound(number, tuple(used), text), 0, None)
    return load_resolved(start.args[0]), start


def test_a_start_without_some_nodes_has_their_number_in_its_config_in_the_first_round_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, "integrity.replicas_every=10")
    (tmp_path / "config.resolved.yaml").write_text(dump_resolved(config))
    found, start = started(ElasticNodes(config), 0, 8, 8)
    assert start.nodes is not None and start.nodes.count == found.launcher.nnodes == 2
    assert start.launcher == found.launcher and start.args[0] != str(tmp_path / "config.resolved.yaml")
    said = capsys.readouterr().err
    assert "16 of 32 devices (nodes 0, 1)" in said
    assert (found.integrity.replicas_every == 0) == ("without integrity.replicas_every" in said)
    whole, start = started(ElasticNodes(config), 7, 8, 8, 8, 8)
    assert whole == config and start.number == 2, "ports are taken in turn"


def test_what_the_config_says_of_megatron_stays_but_for_the_layout(tmp_path: Path) -> None:
    config = config_of(tmp_path, "actor.megatron.bias_activation_fusion=false")
    _, found = chosen(config, tmp_path, 8, 8)
    assert found.actor.megatron["bias_activation_fusion"] is False


def test_the_nodes_that_are_left_keep_their_speeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, "speeds={rollout: [1, 1, 0.5, 0.25]}")
    used, found = chosen(config, tmp_path, 8, 0, 0, 8)
    assert used == [0, 3] and found.speeds is not None and found.speeds.actor is None
    assert found.speeds.rollout == tuple([1.0] * 8 + [0.25] * 8)
    # one replica that lies on both nodes
    elastic = ElasticNodes(config_of(tmp_path, "speeds={actor: [1, 1, 0.5, 0.25]}"))
    found, _ = started(elastic, 0, 8, 0, 0, 8)
    assert found.speeds is None
    assert "without speeds.actor, which the layout cannot have" in capsys.readouterr().err


def test_a_launch_that_has_ended_is_not_entered_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, "launcher.nnodes=1", "launcher.max_restarts=1", name="qwen2.5-7b-1n8g")
    (tmp_path / "config.resolved.yaml").write_text(dump_resolved(config))
    folder = tmp_path / "members"
    for again in (False, True):
        elastic = ElasticNodes(config, finished=lambda: True)
        elastic._folder = folder
        with elastic.open():
            if again:
                with pytest.raises(RunError, match="this launch has ended; allowed: another TLT_JOB"):
                    elastic.next(lambda: False, RoundEnd())
            else:
                assert elastic.next(lambda: False, RoundEnd()) is not None


def test_it_needs_restarts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launcher.max_restarts: found 0; elastic.min_devices needs restarts"):
        config_of(tmp_path, "launcher.max_restarts=0")


@pytest.mark.parametrize(
    ("name", "gpus", "devices"),
    [
        ("qwen2.5-7b-1n8g", 6, 6),
        ("qwen3-4b-1n8g", 6, 6),  # layers of Megatron-Core's own run on GPUs too
        ("qwen3-4b-1n8g", 16, 8),
        ("qwen3-4b-1n8g", 0, 0),
        ("quickstart-deterministic", 0, 2),
    ],
)
def test_a_node_has_a_process_for_each_gpu_that_is_left(
    name: str, gpus: int, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, gpus)
    config = config_of(tmp_path, "elastic.min_devices=1", name=name)
    assert ElasticNodes(config)._own.devices == devices


def test_a_node_without_a_gpu_that_is_left_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 0)
    elastic = ElasticNodes(config_of(tmp_path, name="qwen2.5-7b-1n8g"))
    with pytest.raises(ConfigError, match=r"found 0 usable devices \(0 on node 0\); allowed: at least 8"):
        elastic._choose([elastic._own])
