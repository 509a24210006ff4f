"""Imports what every rank of a training run imports for its policy; a process that has done so can be forked."""

import megatron_tlt.actor  # isort: skip  # prepares the platform, before anything of Megatron
import megatron_tlt.trainer.loop

__all__ = ["megatron_tlt"]
