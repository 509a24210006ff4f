"""torch's flight record: the newest collectives of this process, and the one that it waits in."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

_DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
"""torch's functions by the backend whose collectives they list; builds without NCCL have the second alone."""


def lacks_records() -> str:
    """The functions that torch would need for any record, if it has none of them; empty otherwise."""
    from torch._C import _distributed_c10d as library

    return "" if any(hasattr(library, name) for name in _DUMPS.values()) else ", ".join(_DUMPS.values())


def flight_records() -> dict[str, Any]:
    """The record of each backend that torch has; the newest ``TORCH_FR_BUFFER_SIZE`` collectives are in it."""
    from torch._C import _distributed_c10d as library

    dumps = {backend: getattr(library, name, None) for backend, name in _DUMPS.items()}
    return {backend: json.loads(dump()) for backend, dump in dumps.items() if dump is not None}


def waits_in(records: Mapping[str, Any]) -> str:
    """The first collective that has not finished, with its number, group, ranks and age; empty if all have.

    Collectives of a group finish in their order, so those before a finished one have too: torch never marks the parts
    of a batch of messages, only the batch.
    """
    first: tuple[int, str] | None = None
    for record in records.values():
        pending: dict[Any, dict[str, Any]] = {}
        for entry in record.get("entries", ()):
            group = entry["pg_id"]
            # gloo's never become completed, only retired
            if entry["state"] == "completed" or entry["retired"]:
                pending.pop(group, None)
            else:
                pending.setdefault(group, entry)
        for entry in pending.values():
            if first is None or entry["time_created_ns"] < first[0]:
                first = entry["time_created_ns"], _described(entry, record)
    return "" if first is None else f"{first[1]} for {(time.time_ns() - first[0]) / 1e9:.0f} s"


def _described(entry: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    name, description = entry["process_group"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    ranks = record.get("pg_config", {}).get(name, {}).get("ranks")
    over = f" over ranks {ranks}" if ranks else ""
    return f"{entry['profiling_name']} number {number} of group {description or name}{over}"
