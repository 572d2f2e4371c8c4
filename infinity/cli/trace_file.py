"""The file of a trace, read again: all that is looked at in it is checked here, once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from infinity.api.trace import FORMAT
from infinity.core.errors import DataError
from infinity.core.spans import CAUSES
from infinity.planning.parts import COPY_PARTS, GRADIENT_PARTS

#: part of a chunk → the setting that places it
SETTING: Final = {
    "state": "optimizer_state",
    **dict.fromkeys(COPY_PARTS, "parameters"),
    **dict.fromkeys(GRADIENT_PARTS, "gradients"),
}
_COST: Final = ("ns_per_span", "spans_per_step", "ns_per_step")
#: More than any byte, second or count of a trace comes to.
_MOST: Final = 1e18


def read_trace(path: str) -> dict[str, Any]:
    """Return the content of a file that `infinity.trace` wrote.

    Raises:
        DataError: it cannot be read, or is something else.
    """
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise _not_a_trace(path, str(error)) from error
    about = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else "none of our own"
        raise _not_a_trace(path, f"format {found}")
    for wrong in _damages(content):
        raise _not_a_trace(path, wrong)
    return dict(content)


def _number(value: object, least: float = 0.0) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= _MOST


def _sizes(value: object) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


def _damages(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong in what the analysis reads of a trace."""
    about, events = content["otherData"], content.get("traceEvents")
    placements, nbytes = about.get("placements"), about.get("bytes")
    tuned, limit = about.get("tuned_bytes_per_second"), about.get("limit_reached_ns")
    cost = about.get("cost") or {}
    rates = tuned is None or (isinstance(tuned, list) and all(_number(rate, 1) for rate in tuned))
    for name, right in (
        ("device", isinstance(about.get("device"), str)),
        ("update", isinstance(about.get("update"), str)),
        ("placements", isinstance(placements, dict) and all(map(_sizes, placements.values()))),
        ("tuned_bytes_per_second", rates),
        ("bytes", isinstance(nbytes, dict) and all(_sizes(nbytes.get(tier)) for tier in ("host", "nvme"))),
        ("host_memory", _number(about.get("host_memory"))),
        ("cost", _sizes(cost) and all(name in cost for name in _COST)),
        ("limit_reached_ns", limit is None or _number(limit)),
        ("dropped_spans", _number(about.get("dropped_spans"))),
    ):
        if not right:
            yield f"no {name}, or a wrong one, in otherData"
    if not isinstance(events, list):
        yield "no list traceEvents"
        return
    for number, event in enumerate(events):
        if not isinstance(event, dict) or (event.get("ph") == "X" and not _is_span(event, placements, tuned)):
            yield f"event {number} is damaged: {str(event)[:80]}"


def _is_span(event: Mapping[str, Any], placements: Any, tuned: Any) -> bool:
    """Return whether a complete event has what the analysis reads of one of its kind."""
    kind, args = event.get("cat"), event.get("args", {})
    if not isinstance(kind, str) or not isinstance(args, dict) or not isinstance(args.get("unit", ""), str):
        return False
    times = _number(event.get("ts")) and _number(event.get("dur"))
    if kind in ("compute", "device compute"):
        times = times and _is_word(args.get("phase"))
    if kind in ("stall", "device stall"):
        times = times and args.get("cause") in CAUSES
    if kind in ("read", "write"):
        directory = args.get("directory")
        known = type(directory) is int and 0 <= directory < (len(tuned) if tuned else _MOST)
        part = args.get("part")
        shares = placements.get(SETTING[part], {}) if isinstance(part, str) and part in SETTING else {}
        times = times and known and shares.get("nvme", 0) > 0
    return times and _number(args.get("bytes", 0))


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isalpha()


def _not_a_trace(path: str, found: str) -> DataError:
    return DataError(
        f"{path!r} is no trace of infinity",
        expected=f"a file of `infinity train --trace` or `infinity.trace`, format {FORMAT}",
        found=found,
        cure="record one: infinity train --trace t.json",
    )
