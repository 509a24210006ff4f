"""The search of HetRL (2512.12476): nested successive halving over groupings and sizes, with a genetic search inside.

All randomness is seeded, and the budget is a number of calls of the cost model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from megatron_tlt.planning.hetero.cost import INFEASIBLE, CostModel, Price
from megatron_tlt.planning.hetero.plan import Plan
from megatron_tlt.planning.hetero.space import Grouping, Space, compositions

_POPULATION = 16
_FIRST_SIZES = 8
"""Number of size vectors that a grouping starts with; all of them if there are fewer."""
_HALVING = 0.5
"""Fraction of the budget for the rounds until one grouping is left."""
_TURN, _CHALLENGERS = 0.05, 4
"""Fraction of the budget for each later turn of the best grouping and its neighbours; number of plans to start from."""
_STILL, _SWAPS = 5, 0.5
"""Evaluations without a better plan after which an arm tries swaps, and the fraction of its changes that are swaps.

After a swap, parents have no groups in common and cannot pass on placements. So an arm swaps only if the known times of
the tasks predict a shorter step."""


@dataclass(frozen=True)
class HeteroSearchResult:
    """The best plan of a search; ``trace`` has the best seconds after each evaluation that improved them."""

    plan: Plan
    seconds: float
    evaluations: int
    trace: tuple[tuple[int, float], ...]

    @property
    def feasible(self) -> bool:
        return self.seconds < INFEASIBLE


class _Member(NamedTuple):
    price: Price
    plan: Plan

    @property
    def seconds(self) -> float:
        return self.price.seconds


_seconds: Callable[[_Member], float] = attrgetter("price.seconds")


class _Budget:
    """Calls the cost model a limited number of times and keeps the best plan."""

    def __init__(self, cost: CostModel, evaluations: int) -> None:
        self._cost, self.left, self.used = cost, evaluations, 0
        self.best: _Member | None = None
        self.trace: list[tuple[int, float]] = []

    def __call__(self, plan: Plan) -> _Member:
        self.left -= 1
        self.used += 1
        member = _Member(self._cost(plan), plan)
        if self.best is None or member.seconds < self.best.seconds:
            self.best = member
            self.trace.append((self.used, member.seconds))
        return member

    def found(self) -> HeteroSearchResult:
        assert self.best is not None, "the budget must allow one evaluation"
        return HeteroSearchResult(self.best.plan, self.best.seconds, self.used, tuple(self.trace))


@dataclass
class _SizeArm:
    """A genetic search over plans with one grouping and fixed group sizes; can be continued."""

    space: Space
    grouping: Grouping
    sizes: tuple[int, ...]
    rng: random.Random
    swaps: bool
    seeds: list[Plan] = field(default_factory=list)
    """Plans in the initial population."""
    drawn: int = 0
    still: int = 0
    """Evaluations since the best plan last improved."""
    population: list[_Member] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(map(_seconds, self.population), default=math.inf)

    def run(self, steps: int, budget: _Budget) -> None:
        """Runs this many evaluations, or as many as are left."""
        for _ in range(min(steps, budget.left)):
            member = budget(self._next())
            self.still = 0 if member.seconds < self.best else self.still + 1
            self.space.recall.learn(member.plan, member.price.tasks, INFEASIBLE)
            self._keep(member)

    def _next(self) -> Plan:
        if self.seeds:
            return self.seeds.pop()
        if self.drawn < _POPULATION:
            self.drawn += 1
            return self.space.plan(self.grouping, self.sizes, self.rng, known_too=True)
        (price, plan), mate = self._parent(), self._parent()
        plan = self.space.cross(plan, price.tasks, mate.plan, mate.price.tasks)
        swaps = self.swaps and len(self.sizes) > 1 and self.still >= _STILL
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            swapped = None
            if swaps and self.rng.random() < _SWAPS:
                swapped = self.space.swap_groups(plan, price.tasks, self.rng)
            plan = swapped or self.space.change_task(plan, price.tasks, self.rng)
        return plan

    def _parent(self) -> _Member:
        return min(self.rng.choices(self.population, k=3), key=_seconds)

    def _keep(self, member: _Member) -> None:
        """Replaces a member of equal cost, so that the population stays diverse, else the worst."""
        for index, other in enumerate(self.population):
            if other.price == member.price:
                self.population[index] = member
                return
        self.population.append(member)
        if len(self.population) > _POPULATION:
            self.population.remove(max(self.population, key=_seconds))


class _Branch:
    """One grouping with its arms."""

    def __init__(self, space: Space, grouping: Grouping, rng: random.Random, swaps: bool) -> None:
        self.space, self.grouping, self.rng, self.swaps = space, grouping, rng, swaps
        self.groups = max(grouping) + 1
        self.arms: list[_SizeArm] = []

    @property
    def best(self) -> float:
        return min((arm.best for arm in self.arms), default=math.inf)

    def run(self, steps: int, budget: _Budget) -> None:
        """Successive halving over size vectors: each round doubles the evaluations of the better half."""
        self._open(steps)
        alive, left = list(self.arms), steps
        rungs = math.ceil(math.log2(len(alive))) + 1 if len(alive) > 1 else 1
        for rung in range(rungs):
            share = left // (rungs - rung) // len(alive)
            for arm in alive:
                arm.run(max(1, share), budget)
                left -= max(1, share)
            alive = sorted(alive, key=lambda arm: arm.best)[: math.ceil(len(alive) / 2)]
        self.arms = sorted(self.arms, key=lambda arm: arm.best)[: max(2, math.ceil(len(self.arms) / 2))]

    def _open(self, steps: int) -> None:
        """Opens new arms: first spread over the sizes, later near the best plan's."""
        if self.groups == 1:
            self.arms = self.arms or [self._arm((self.space.cluster.size,))]
            return
        most = max(1, min(_FIRST_SIZES, steps // 12))
        if self.arms and not any(arm.population for arm in self.arms):
            return
        if not self.arms:
            few = list(islice(compositions(self.space.cluster.size, self.groups), most + 1))
            if len(few) > most:
                few = list({self.space.sizes(self.groups, self.rng) for _ in range(most)})
            self.arms = [self._arm(sizes) for sizes in sorted(few)]
            return
        best = self.champion()
        for _ in range(most - len(self.arms)):
            plan = self.space.resized(best.plan, best.price.tasks, self.rng)
            self.begin(plan)

    def champion(self) -> _Member:
        """The best plan of all arms."""
        return min((member for arm in self.arms for member in arm.population), key=_seconds)

    def begin(self, plan: Plan) -> None:
        """Queues the plan for evaluation by the arm of its sizes; an arm created for it starts with this plan only."""
        sizes = tuple(map(len, plan.groups))
        arm = next((arm for arm in self.arms if arm.sizes == sizes), None)
        if arm is None:
            arm = self._arm(sizes)
            arm.drawn = _POPULATION
            self.arms.append(arm)
        arm.seeds.append(plan)

    def _arm(self, sizes: tuple[int, ...]) -> _SizeArm:
        return _SizeArm(self.space, self.grouping, sizes, random.Random(self.rng.random()), self.swaps)


def search(cost: CostModel, evaluations: int, seed: int = 0, *, swaps: bool = True) -> HeteroSearchResult:
    """The best plan found within a number of evaluations; it may not fit (``HeteroSearchResult.feasible``).

    With ``swaps``, stalled arms exchange devices between groups; otherwise a plan's groups stay as drawn.
    """
    rng, budget = random.Random(seed), _Budget(cost, evaluations)
    space = Space(cost.cluster, cost.workflow)
    alive = [_Branch(space, grouping, random.Random(rng.random()), swaps) for grouping in space.groupings]
    rungs = math.ceil(math.log2(len(alive))) if len(alive) > 1 else 0
    for _ in range(rungs):
        share = max(1, int(evaluations * _HALVING / rungs / len(alive)))
        for branch in alive[: budget.left]:
            branch.run(share, budget)
        alive = sorted(alive, key=lambda branch: branch.best)[: math.ceil(len(alive) / 2)]
    best = alive[0]
    while budget.left > 0:
        best.run(max(_POPULATION, int(evaluations * _TURN)), budget)
        best = _challenged(best, int(evaluations * _TURN), budget, rng)
    return budget.found()


def _challenged(best: _Branch, steps: int, budget: _Budget, rng: random.Random) -> _Branch:
    """The best branch, or a better one started from its best plan with one task in another group."""
    champion, plans = best.champion(), []
    for _ in range(_CHALLENGERS):
        plan = best.space.regrouped(champion.plan, rng)
        for _ in range(rng.randrange(4)):
            plan = best.space.resized(plan, champion.price.tasks, rng)
        plans.append(plan)
    for grouping in dict.fromkeys(plan.group_of for plan in plans if plan.group_of != best.grouping):
        other = _Branch(best.space, grouping, random.Random(rng.random()), best.swaps)
        for plan in (plan for plan in plans if plan.group_of == grouping):
            other.begin(plan)
        other.run(max(1, steps // _CHALLENGERS), budget)
        if other.best < best.best:
            best = other
    return best


def random_search(cost: CostModel, evaluations: int, seed: int = 0) -> HeteroSearchResult:
    """The best of random plans, drawn like the populations of ``search``, over all groupings and sizes."""
    rng, budget, space = random.Random(seed), _Budget(cost, evaluations), Space(cost.cluster, cost.workflow)
    while budget.left > 0:
        grouping = rng.choice(space.groupings)
        budget(space.plan(grouping, space.sizes(max(grouping) + 1, rng), rng))
    return budget.found()
