"""Complete requests and rollouts for tests of the suffix drafter."""

from __future__ import annotations

from dataclasses import asdict

from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.suffix_store import PROBLEM_BYTES
from megatron_tlt.speculation.suffix_tree import SpeculationRule
from megatron_tlt.speculation.token_drafter import FinishedResponse, Proposal, TokenDrafter

MIN_BYTES = 1 << 20
EAGER = SpeculationRule(factor=1.0, offset=8.0, min_probability=0.0)
EAGER_KEYS = asdict(EAGER)
"""As the config keys of the suffix drafter."""


def say(drafter: TokenDrafter, name: str, problem: str, response: list[int], prompt: tuple[int, ...] = (1, 2)) -> None:
    """Run a complete request, token by token."""
    drafter.start(name, problem, prompt)
    for token in response:
        drafter.extend(name, [token])
    drafter.finish(name)


def visit(drafter: TokenDrafter, *responses: tuple[str, list[int]], prompt: tuple[int, ...] = (1, 2)) -> None:
    """Run a complete rollout of (problem, response)."""
    for name, (problem, response) in enumerate(responses):
        say(drafter, str(name), problem, response, prompt)
    drafter.end_rollout([FinishedResponse(problem, prompt, response) for problem, response in responses])


def draft(drafter: TokenDrafter, problem: str, begin: list[int], max_tokens: int = 8) -> Proposal:
    """The proposal for a request that has generated ``begin``; its response is kept until the rollout ends."""
    drafter.start("probe", problem, [1, 2])
    drafter.extend("probe", begin)
    proposal = drafter.propose("probe", max_tokens)
    drafter.finish("probe")
    return proposal


def held_bytes(drafter: SuffixDrafter) -> int:
    """Recount the memory, structure by structure."""
    own = sum(request.own.nbytes for request in drafter._requests.values() if request.own is not None)
    stored = sum(response.nbytes for response in drafter._store) + len(drafter._store) * PROBLEM_BYTES
    return own + stored + sum(tree.nbytes for tree in drafter._trees.values())
