"""The learned drafter: models, losses, data buffer, training and evaluation; independent of vLLM and Megatron."""

from megatron_tlt.drafter.buffer import DataBuffer
from megatron_tlt.drafter.checkpoint import load_without_target, read_checkpoint, write_checkpoint
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.evaluation import Acceptance, greedy_chains, teacher_forced_acceptance
from megatron_tlt.drafter.folder import aux_layers_of, drafter_from_target, first_drafter, load_drafter, save_drafter
from megatron_tlt.drafter.model import DraftModel, SharedWeights
from megatron_tlt.drafter.pairs import Pair, read_pairs, write_pairs
from megatron_tlt.drafter.session import SessionResult, train_session
from megatron_tlt.drafter.state import DrafterState
from megatron_tlt.drafter.target_states import TargetStates
from megatron_tlt.drafter.training import FAILURES, DrafterStepResult, DrafterTrainer
from megatron_tlt.drafter.warmup import WarmupPlan, WarmupReport, warm_up

__all__ = [
    "FAILURES",
    "Acceptance",
    "DataBuffer",
    "DraftModel",
    "DrafterState",
    "DrafterStepResult",
    "DrafterTrainer",
    "Entry",
    "Pair",
    "SessionResult",
    "SharedWeights",
    "TargetStates",
    "WarmupPlan",
    "WarmupReport",
    "aux_layers_of",
    "drafter_from_target",
    "first_drafter",
    "greedy_chains",
    "load_drafter",
    "load_without_target",
    "read_checkpoint",
    "read_pairs",
    "save_drafter",
    "teacher_forced_acceptance",
    "train_session",
    "warm_up",
    "write_checkpoint",
    "write_pairs",
]
