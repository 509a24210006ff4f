"""Releases that do not fit are named before anything else happens."""

from __future__ import annotations

from megatron_tlt.platform.versions import check_versions, installed_versions, violations


def test_the_installed_releases_fit() -> None:
    check_versions()


def test_each_wrong_release_gets_a_line_with_what_fits() -> None:
    found = {**installed_versions(), "vllm": "0.10.1", "megatron-core": None}
    lines = violations(found)
    assert len(lines) == 2
    assert any(line.startswith("vllm: found 0.10.1; needed: 0.32.*") for line in lines)
    assert any(line.startswith("megatron-core: not installed") for line in lines)
