"""Where the time of a compiled program goes: a profiler's trace as a table by operation.

A trace has an event for each instruction that ran on a device. An instruction that runs others,
such as a loop, spans their events; what counts is its own time, without theirs.
"""

import collections
import dataclasses
import glob
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax

# TPUs have a line of this name, which spans all that runs on their cores. GPUs and CPUs have a line
# for each stream or thread, whose events name the instruction in a statistic.
_TPU_LINE = "XLA Ops"
_INSTRUCTION = "hlo_op"


@dataclasses.dataclass
class Share:
    """The own time of the events of an instruction, over all devices and rounds."""

    seconds: float = 0.0
    events: int = 0


@dataclasses.dataclass(frozen=True)
class _Event:
    """The run of an instruction, in nanoseconds."""

    name: str
    start: float
    end: float


def shares_of_trace(folder: str) -> dict[str, Share]:
    """Returns the own time of each instruction in the latest trace below a directory.

    Instructions are named as in the compiled program's text. Without a trace the result is empty.
    """
    paths = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    if not paths:
        return {}
    trace = jax.profiler.ProfileData.from_file(max(paths, key=os.path.getmtime))
    shares: dict[str, Share] = collections.defaultdict(Share)
    for plane in trace.planes:
        for line in plane.lines:
            _add_own_times(_events_of(line), shares)
    return dict(shares)


def shares_by_source(
    shares: Mapping[str, Share], sources: Mapping[str, str]
) -> list[tuple[str, Share]]:
    """Adds up the shares of the instructions of each source, the longest first.

    Args:
      shares: The own time of each instruction.
      sources: The source of each instruction that has one. The others stand for themselves,
        without their number: "copy.12" is "copy".
    """
    by_source: dict[str, Share] = collections.defaultdict(Share)
    for name, share in shares.items():
        source = sources.get(name) or name.split(".")[0]
        by_source[source].seconds += share.seconds
        by_source[source].events += share.events
    return sorted(by_source.items(), key=lambda item: -item[1].seconds)


def _events_of(line: Any) -> list[_Event]:
    """Returns the events of instructions on a line of a trace, the outer ones first."""
    events = []
    for event in line.events:
        statistics = dict(event.stats)
        if line.name == _TPU_LINE:
            # The name is the instruction's text: "%fusion.3 = ..".
            name = event.name.split(" ")[0].lstrip("%")
        elif _INSTRUCTION in statistics:
            name = str(statistics[_INSTRUCTION])
        else:
            continue
        events.append(_Event(name, event.start_ns, event.start_ns + event.duration_ns))
    return sorted(events, key=lambda event: (event.start, -event.end))


def _add_own_times(events: Iterable[_Event], shares: dict[str, Share]) -> None:
    """Adds each event's time without that of the events that it spans."""
    open_events: list[_Event] = []
    for event in events:
        while open_events and open_events[-1].end <= event.start:
            open_events.pop()
        seconds = (event.end - event.start) / 1e9
        if open_events:
            shares[open_events[-1].name].seconds -= seconds
        shares[event.name].seconds += seconds
        shares[event.name].events += 1
        open_events.append(event)
