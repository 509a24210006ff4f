"""``tlt completion SHELL``: a script with which the shell completes commands, options, configs and files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_tlt.config.shipped import shipped

_SHELLS = ("bash", "zsh")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("completion", help='complete in the shell: eval "$(tlt completion bash)"')
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=" or ".join(_SHELLS))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import shtab

    from megatron_tlt.cli import build_parser

    names = " ".join(shipped())
    preamble = {
        "bash": f'_tlt_configs() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
        "zsh": f"_tlt_configs() {{ _alternative 'configs:launch config:({names})' 'files:file:_files' }}",
    }
    parser = build_parser()
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, arguments.shell, preamble=preamble[arguments.shell]))
    return 0


def _complete_files(parser: argparse.ArgumentParser, file: Any) -> None:
    """Tells shtab, through its attribute ``complete``, which arguments are configs and files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                _complete_files(own, file)
        elif action.dest == "config":
            action.complete = dict.fromkeys(_SHELLS, "_tlt_configs")  # type: ignore[attr-defined]
        elif action.type is Path:
            action.complete = file  # type: ignore[attr-defined]
