"""The spot trainer: trains the drafter on released ranks under a coordinator, with asynchronous checkpoints."""

from megatron_tlt.spot.checkpointer import SelectiveCheckpointer, newest
from megatron_tlt.spot.client import CoordinatorClient
from megatron_tlt.spot.coordinator import Coordinator
from megatron_tlt.spot.follower import Follower
from megatron_tlt.spot.messages import MessageSigner, new_secret
from megatron_tlt.spot.service import CoordinatorService
from megatron_tlt.spot.types import Advice, Directive, MemberProgress, ReplicaState, Report, SessionOrder

__all__ = [
    "Advice",
    "Coordinator",
    "CoordinatorClient",
    "CoordinatorService",
    "Directive",
    "Follower",
    "MemberProgress",
    "MessageSigner",
    "ReplicaState",
    "Report",
    "SelectiveCheckpointer",
    "SessionOrder",
    "new_secret",
    "newest",
]
