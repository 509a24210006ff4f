"""``tlt config CONFIG [key.path=value ...]``: prints a resolved config for users and for job scripts.

``tlt config --docs KEY`` explains a key instead.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import Any

from megatron_tlt.cli import preflight, runs
from megatron_tlt.config.docs import lookup
from megatron_tlt.config.loader import dump_resolved, load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.files import atomic_write_text

FINISHED = "finished"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("config", help="check a config and print it resolved, or explain a key")
    runs.add_config_arguments(parser, required=False)
    parser.add_argument("--docs", metavar="KEY", help="type, default and meaning of a key, or of a section's keys")
    parser.add_argument(
        "--get",
        metavar="KEY",
        action="append",
        help=f"print only this key's values, one per line, without checking tasks and files (repeatable); "
        f"'{FINISHED}': whether its run is finished, yes or no",
    )
    parser.add_argument("--keep", metavar="NAME", help="also write the resolved config to NAME in the run's folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if (arguments.config is None) == (arguments.docs is None):
        raise ConfigError("CONFIG: allowed: either a config, or --docs with a key")
    if arguments.docs is not None:
        return _explain(arguments.docs)
    if arguments.get:  # job scripts read values; `tlt doctor` and `tlt train` check the config
        config = load_config(arguments.config, arguments.overrides, check_libraries=False)
    else:
        config = preflight.load_checked(arguments.config, arguments.overrides, starts=False)
    values = [_value(config, key) for key in arguments.get or ()]
    if arguments.keep:
        atomic_write_text(config.run.dir / arguments.keep, dump_resolved(config))
    sys.stdout.write("".join(f"{value}\n" for value in values) if arguments.get else dump_resolved(config))
    return 0


def _explain(key: str) -> int:
    for found in lookup(key):
        print(found.key)
        for line in (found.meaning, f"type: {found.kind}", f"default: {found.default}"):
            print(textwrap.fill(line, 78, initial_indent="  ", subsequent_indent="    "))
    return 0


def _is_key(key: str) -> bool:
    try:
        return bool(lookup(key))
    except ConfigError:
        return False


def _value(config: TltConfig, key: str) -> str:
    if key == FINISHED:
        return "yes" if runs.is_finished(config) else "no"
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        if value is None and _is_key(key):  # of a section that is not there
            break
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(f"--get: no key {key!r} in the config; allowed: a key.path of it, or {FINISHED!r}")
        value = value[part]
    return str(value)
