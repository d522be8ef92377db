"""torch's flight recorder: what this rank has lately asked its backends for.

It records by itself, as many messages as `TORCH_FR_BUFFER_SIZE` says. What it has seen is told in errors, and kept for
`torchfrtrace` where the environment names a file.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_flight_recorder: Any = torch._C._distributed_c10d

_DUMP_PATH_VARS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""What torch calls the beginning of a file's name, to which it adds the rank."""


def describe_last_collective(process_group: dist.ProcessGroup) -> str:
    """The newest in a group, in words; "" if nothing was recorded."""
    with suppress(Exception):  # a help in an error, never another error
        entries = [it for it in _flight_recorder_entries() if it["process_group"][0] == process_group.group_name]
        return _format_recorder_entry(entries[-1]) if entries else ""
    return ""


def dump_flight_recorder() -> str:
    """Where all that was recorded is now, if the environment names a place for it; else ""."""
    beginning = next((os.environ[name] for name in _DUMP_PATH_VARS if os.environ.get(name)), "")
    if not beginning:
        return ""
    with suppress(Exception):
        file = Path(f"{beginning}{dist.get_rank()}")
        file.write_bytes(_flight_recorder._dump_fr_trace())
        return str(file)
    return ""


def _flight_recorder_entries() -> list[dict[str, Any]]:
    found = json.loads(_flight_recorder._dump_fr_trace_json(includeCollectives=True))
    entries: list[dict[str, Any]] = found.get("entries", [])
    return entries


def _format_recorder_entry(entry: dict[str, Any]) -> str:
    kind, number = ("p2p", entry["p2p_seq_id"]) if entry["is_p2p"] else ("collective", entry["collective_seq_id"])
    sizes = entry["input_sizes"] or entry["output_sizes"]
    return f"{entry['profiling_name']}{f' of {sizes}' if sizes else ''}, {kind} {number} of its group"
