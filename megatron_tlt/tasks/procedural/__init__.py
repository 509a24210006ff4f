"""Families of problems with axes of difficulty, canonical forms, worked solutions and exact verifiers."""

from megatron_tlt.tasks.procedural.counting import PipelineCounting
from megatron_tlt.tasks.procedural.family import ProblemFamily
from megatron_tlt.tasks.procedural.graph_queries import GraphQueries
from megatron_tlt.tasks.procedural.particles import GridParticles

#: ``tasks[].name`` of ``kind: procedural`` -> family.
FAMILIES: dict[str, type[ProblemFamily]] = {
    family.name: family for family in (PipelineCounting, GraphQueries, GridParticles)
}

__all__ = ["FAMILIES", "ProblemFamily"]
