"""Particles that move and turn on a grid; the position or the orientation of one of them is asked for.

x grows to the east, y to the north. The solution of ``grid|A 3,5N|A r|A f2|?A pos`` has the state after each step of
the particle that is asked for: ``3,5E``, ``5,5E``, and ``#### 5,5``. A step that leaves the grid or changes nothing is
never drawn.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_tlt.tasks.procedural.family import Cell, Instance, ProblemFamily, ProceduralParams

_DIRECTIONS = "NESW"
_WORDS = {"N": "north", "E": "east", "S": "south", "W": "west"}
_DELTAS = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}
_TURNS = {"l": -1, "r": 1, "u": 2}
_TURN_WORDS = {"l": "turns left", "r": "turns right", "u": "turns around"}
_TRIES = 30
_POSITION = re.compile(r"\(?\s*(-?\d{1,9})\s*[,;]\s*(-?\d{1,9})\s*\)?")

Frame = Literal["absolute", "relative"]
Asked = Literal["position", "orientation"]
Step = tuple[str, str, int]
"""Particle, action and its number: ``f`` and ``b`` n cells (relative), ``N E S W`` n cells (absolute); ``l r u`` turn,
``=N`` and so on face (0)."""


class GridParticlesParams(ProceduralParams):
    """Axes: how many ``particles`` and ``steps``, the ``frames`` of the steps, and what is ``asked``.

    The grid has ``size`` cells in each direction; one step moves by at most ``max_move`` of them.
    """

    particles: Annotated[tuple[Annotated[int, Field(ge=1, le=6)], ...], Field(min_length=1)] = (1, 2, 3)
    steps: Annotated[tuple[Annotated[int, Field(ge=1, le=40)], ...], Field(min_length=1)] = (2, 4, 6, 8)
    frames: Annotated[tuple[Frame, ...], Field(min_length=1)] = ("absolute", "relative")
    asked: Annotated[tuple[Asked, ...], Field(min_length=1)] = ("position", "orientation")
    size: Annotated[int, Field(ge=4, le=100)] = 20
    max_move: Annotated[int, Field(ge=1, le=20)] = 5


@dataclass(frozen=True)
class Pose:
    """Cell and orientation of a particle."""

    x: int
    y: int
    facing: str

    def after(self, action: str, cells: int) -> Pose:
        """The pose after one action."""
        if action in _TURNS:
            return Pose(self.x, self.y, _DIRECTIONS[(_DIRECTIONS.index(self.facing) + _TURNS[action]) % 4])
        if action.startswith("="):
            return Pose(self.x, self.y, action[1])
        dx, dy = _DELTAS[action if action in _DELTAS else self.facing]
        sign = -1 if action == "b" else 1
        return Pose(self.x + sign * cells * dx, self.y + sign * cells * dy, self.facing)

    def __str__(self) -> str:
        return f"{self.x},{self.y}{self.facing}"


class GridParticles(ProblemFamily):
    name = "grid_particles"
    params_type = GridParticlesParams

    def axes(self, params: GridParticlesParams) -> list[Cell]:
        self._params = params
        axes = itertools.product(sorted(set(params.particles)), sorted(set(params.steps)), params.frames, params.asked)
        return [
            {"particles": p, "steps": s, "frame": frame, "asked": asked}
            for p, s, frame, asked in axes
            if s >= p  # each particle moves
        ]

    def build(self, rng: random.Random, cell: Cell) -> Instance | None:
        names = [chr(ord("A") + i) for i in range(cell["particles"])]
        start = {name: self._start(rng) for name in names}
        asked = rng.choice(names)
        others = cell["steps"] - len(names)
        movers = [*names, *(asked if rng.random() < 0.5 else rng.choice(names) for _ in range(others))]
        rng.shuffle(movers)
        now, steps, trace = dict(start), list[Step](), list[Pose]()
        for name in movers:
            found = self._step(rng, name, now[name], cell["frame"])
            if found is None:
                return None
            steps.append(found)
            now[name] = now[name].after(*found[1:])
            if name == asked:
                trace.append(now[name])
        end, own = now[asked], [(action, cells) for name, action, cells in steps if name == asked]
        is_position = cell["asked"] == "position"
        answer = f"{end.x},{end.y}" if is_position else end.facing
        return Instance(
            compact="|".join(
                [
                    "grid",
                    *(f"{name} {pose}" for name, pose in start.items()),
                    *(f"{name} {action}{cells or ''}" for name, action, cells in steps),
                    f"?{asked} {'pos' if is_position else 'dir'}",
                ]
            ),
            natural=self._natural(start, steps, asked, is_position),
            answer=answer,
            steps=[str(pose) for pose in trace],
            canonical=json.dumps(["grid", self._params.size, str(start[asked]), own, cell["asked"]]),
            structure="|".join(["grid", *(_kind(action) for action, _ in own), cell["asked"]]),
            check={"size": self._params.size},
        )

    def _start(self, rng: random.Random) -> Pose:
        return Pose(rng.randrange(self._params.size), rng.randrange(self._params.size), rng.choice(_DIRECTIONS))

    def _step(self, rng: random.Random, name: str, pose: Pose, frame: str) -> Step | None:
        for _ in range(_TRIES):
            cells = rng.randint(1, self._params.max_move)
            if rng.random() < 0.4:
                action = rng.choice("lru") if frame == "relative" else "=" + rng.choice(_DIRECTIONS)
                cells = 0
            else:
                action = rng.choice("ffb") if frame == "relative" else rng.choice(_DIRECTIONS)
            after = pose.after(action, cells)
            if after != pose and 0 <= after.x < self._params.size and 0 <= after.y < self._params.size:
                return name, action, cells
        return None

    def _natural(self, start: Mapping[str, Pose], steps: Sequence[Step], asked: str, is_position: bool) -> str:
        size = self._params.size
        places = " ".join(
            f"Particle {name} is at ({pose.x}, {pose.y}) and faces {_WORDS[pose.facing]}."
            for name, pose in start.items()
        )
        moves = " ".join(
            f"{number}. Particle {name} {_sentence(action, cells)}."
            for number, (name, action, cells) in enumerate(steps, 1)
        )
        question = (
            f"At which cell is particle {asked} now? Answer as x,y."
            if is_position
            else f"Which direction does particle {asked} face now? Answer N, E, S or W."
        )
        return (
            f"A grid has cells (x, y) with x and y from 0 to {size - 1}; x grows to the east and y to the north. "
            f"{places} Then the following happens. {moves} {question}"
        )

    @staticmethod
    def closeness(answer: str, check: Mapping[str, Any], given: str) -> float | None:
        if "," not in answer:
            letters = {word: letter for letter, word in _WORDS.items()}
            facing = letters.get(given.strip().lower(), given.strip().upper())
            return None if facing not in _WORDS else float(facing == answer)
        found = _POSITION.fullmatch(given.strip())
        if found is None:
            return None
        x, y = map(int, answer.split(","))
        distance = abs(int(found[1]) - x) + abs(int(found[2]) - y)
        return 1.0 if distance == 0 else max(0.0, 0.99 - distance / int(check["size"]))


def _kind(action: str) -> str:
    return "=" if action.startswith("=") else "move" if action in _DELTAS else action


def _sentence(action: str, cells: int) -> str:
    if action in _TURN_WORDS:
        return _TURN_WORDS[action]
    if action.startswith("="):
        return f"turns to face {_WORDS[action[1]]}"
    unit = "cell" if cells == 1 else "cells"
    if action in _DELTAS:
        return f"moves {cells} {unit} {_WORDS[action]}"
    return f"moves {cells} {unit} {'forward' if action == 'f' else 'backward'}"
