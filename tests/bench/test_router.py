"""The benchmark of router replay, at a small size."""

from __future__ import annotations

import argparse

import pytest

from megatron_tlt.bench import router

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_three_forms_are_compared_on_the_same_responses() -> None:
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    result = router.run(parser.parse_args(["--seeds", "5", "--layers", "2", "--experts", "16", "--responses", "4"]))
    own, ids, both = result.rows
    assert [row["experts"] for row in (own, ids, both)] == ["own", "ids", "ids_and_weights"]
    assert {row["tokens"] for row in result.rows} == {4 * 96}
    assert own["agreement"] is None and 0.5 < ids["agreement"] < 1
    assert 0 < max(ids["k3_kl"], both["k3_kl"]) < own["k3_kl"]
    assert result.targets["k3_kl, own over ids"]["value"] == own["k3_kl"] / ids["k3_kl"]
