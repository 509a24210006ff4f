"""Sources of problems: generators (reasoning-gym, users' functions) and prompt files; train and held-out splits."""

from megatron_tlt.tasks.mixture import GENERATORS, ProblemMixture, build_sources
from megatron_tlt.tasks.types import Problem

__all__ = ["GENERATORS", "Problem", "ProblemMixture", "build_sources"]
