"""The two ways a command may fail, and the exit status each one has.

Every message is one line (or one line per violation) that names the file, key or tensor, what was found and what is
allowed; the command line prints it without a traceback unless ``--traceback`` is given.
"""


class TltError(Exception):
    """Base of all errors meant for the user."""

    exit_status = 1


class ConfigError(TltError):
    """What was asked for is wrong: an unknown key, a layout that does not fit, a bad row in a prompt file."""

    exit_status = 2


class RunError(TltError):
    """What was asked for is right, but it went wrong while running: a full disk, a port in use, a stale weight."""

    exit_status = 1


class RanksOverdue(RunError):
    """Ranks that were still running when their time was over, and were killed."""


class RanksLost(RunError):
    """Nothing is wrong here, but ranks of other nodes do not answer any more: a new start may find them again."""


class NodesChange(RunError):
    """The run's state is kept, and nodes join or are left out: the launch starts all ranks again, on other nodes."""


class RunRefused(RunError):
    """All ranks refuse to go on, at the same point: a new start would come to the same, so there is none."""

    exit_status = 3
