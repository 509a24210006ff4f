"""The command line: ``tlt <command>``. One file per command; heavy libraries are imported inside the commands."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from megatron_tlt import __version__
from megatron_tlt.cli import (
    bench,
    calibrate,
    compare,
    completion,
    config,
    convert,
    doctor,
    evaluate,
    export_drafter,
    init,
    models,
    plan,
    replay,
    report,
    rollout,
    simulate,
    tasks,
    train,
    verify,
    watch,
)
from megatron_tlt.errors import TltError

_INSTALL = "needed: a whole stack, by the package's extras cpu and gpu or `bash launch/quickstart.sh --setup-only`"
_COMMANDS = (
    init,
    models,
    tasks,
    plan,
    simulate,
    config,
    doctor,
    train,
    rollout,
    replay,
    evaluate,
    calibrate,
    watch,
    report,
    compare,
    verify,
    convert,
    export_drafter,
    bench,
    completion,
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each puts the function to call into ``run``."""
    parser = argparse.ArgumentParser(prog="tlt", description="Reinforcement learning on Megatron-Core and vLLM.")
    parser.add_argument("--version", action="version", version=f"tlt {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    for own in commands.choices.values():
        own.add_argument("--traceback", action="store_true", help="show tracebacks and the workers' own messages")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0; 1 if the run failed; 2 if the request is invalid; 128 + signal if a signal stopped it.
    """
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    arguments, rest = parser.parse_known_args(argv)
    if hasattr(arguments, "rest"):
        arguments.rest, rest = rest, []
    # argparse rejects positionals after an option: overrides may stand on both sides of --fresh.
    if rest and (not hasattr(arguments, "overrides") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    try:
        return int(arguments.run(arguments))
    except TltError as error:
        if arguments.traceback:
            traceback.print_exc()
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_status
    except ModuleNotFoundError as error:
        if arguments.traceback or not error.name or error.name.startswith("megatron_tlt"):
            raise
        print(f"error: this command needs {error.name}, which is not installed; {_INSTALL}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `tlt ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
