"""Imports what every rank of a training run imports for its policy; a process that has done so can be forked."""

import megatron_tlt.actor
import megatron_tlt.trainer.loop  # noqa: F401
