"""Reduction of gradients over several ranks: the sum of the gradients on all ranks, and this rank's slices.

[Note: one order of sums] Every rank has a slice of each run of a unit. Ranks send each other their parts of
it; the owner adds them in fp32 in the order of the ranks, and divides once. A result that replaces a gradient
is then rounded to the compute dtype, once; a result that is added to a gradient stays fp32. So for a given
number of ranks, the placement, the tier and the size of chunks change no bit. If several gradients arrive for
one parameter before its unit is reduced, their rank adds them: those of one backward in the dtype in which
autograd made them, as autograd would; those of several backwards (stages 0 and 1) in fp32. So the stage
changes no bit of the gradients of one backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from infinity.core.errors import DivergenceError
from infinity.hardware.device import Device, Event
from infinity.hardware.ranks import Comm
from infinity.planning.partition import UnitLayout

from .buffer import Arrival, UnitBuffer

#: How a gradient came, in what ranks tell each other: one byte for each parameter.
_NOT, _FRESH, _ADDED, _ZERO = range(4)
_SAID = ("no gradient", "a first one", "one more", "zeros")


def codes_of(layouts: Sequence[UnitLayout], arrivals: Mapping[int, Mapping[int, Arrival]]) -> bytes:
    """Return what has arrived of units on this rank, by unit and parameter, for `of_all`."""
    codes = bytearray()
    for layout in layouts:
        came = arrivals.get(layout.index, {})
        for arrival in map(came.get, range(len(layout.params))):
            kind = _NOT if arrival is None else _ZERO if arrival.zero else _FRESH if arrival.fresh else _ADDED
            codes.append(kind)
    return bytes(codes)


def of_all(
    layouts: Sequence[UnitLayout], arrivals: Mapping[int, Mapping[int, Arrival]], told: Sequence[bytes]
) -> dict[int, dict[int, Arrival]]:
    """Return what has arrived of each unit on any rank, by unit; `told`: `codes_of` of all.

    Raises:
        DivergenceError: a gradient replaces another one here, and is added to it elsewhere.
    """
    together, begin = {}, 0
    for unit in layouts:
        end = begin + len(unit.params)
        codes = [codes[begin:end] for codes in told]
        together[unit.index] = _together(unit, arrivals.get(unit.index, {}), codes)
        begin = end
    return together


def elsewhere(mine: Mapping[int, Arrival], together: Mapping[int, Arrival]) -> list[int]:
    """Return what has arrived on another rank alone: here there is nothing, or zero."""
    return [i for i, a in together.items() if i not in mine or (mine[i].zero and not a.zero)]


def _together(
    layout: UnitLayout, arrivals: Mapping[int, Arrival], told: Sequence[bytes]
) -> dict[int, Arrival]:
    together: dict[int, Arrival] = {}
    for index, spec in enumerate(layout.params):
        said = [codes[index] for codes in told]
        kinds = set(said) - {_NOT}
        if not kinds:
            continue
        if {_FRESH, _ADDED} <= kinds or {_ZERO, _ADDED} <= kinds:
            raise DivergenceError(
                f"ranks do not agree on whether {spec.name!r} has a gradient already",
                expected="zero_grad() and `p.grad = None` at the same point of the program on all ranks",
                found=", ".join(f"rank {rank}: {_SAID[code]}" for rank, code in enumerate(said)),
                cure="call `optimizer.zero_grad()` at the same point on all ranks",
            )
        factor = arrivals[index].factor if index in arrivals else 1.0
        together[index] = Arrival(_ADDED not in kinds, factor, zero=kinds == {_ZERO})
    return together


def add_up(comm: Comm, mine: UnitBuffer, made: Event | None, device: Device) -> UnitBuffer:
    """Return a unit's gradient, added up over all ranks, as far as this rank has it: its slices, or, where
    each rank has the whole, all. `mine` is what has arrived on this rank, sealed, `made` by an event; if that
    is fp32 on any rank, so is what replaces a gradient. Collective. See [Note: one order of sums].

    Raises:
        DivergenceError: a gradient replaces another one here, and is added to it elsewhere.
        RankError: another rank failed, or does something else.
    """
    layout, here = mine.layout, {mine.layout.index: mine.arrivals}
    what = f"reduction of the gradients of unit {layout.name!r}"
    told = comm.exchange(what, codes_of([layout], here) + bytes([mine.is_wide]))
    arrivals, is_wide = of_all([layout], here, told)[layout.index], any(codes[-1] for codes in told)
    if all(arrival.zero for arrival in arrivals.values()):
        return UnitBuffer(layout, device, arrivals=arrivals)
    with device.aside():
        device.wait_on_device(made)
        if is_wide:
            mine.widen()
            device.wait_on_device(mine.mark())
        first = 0 if layout.whole else comm.rank
        sums = UnitBuffer(layout, device, arrivals=arrivals, is_wide=is_wide, first=first)
        for run in layout.trainable_runs:
            fresh = all(a.fresh for i, a in arrivals.items() if layout.place(i)[0] is run)
            part = mine.run(run)
            device.uses(part)  # it was made on another stream, and the mean may lie in it
            values = comm.reduce(part, narrow=fresh and not is_wide)
            sums.hold(run, _gather(comm, part, values) if layout.whole else values)
        return sums


def _gather(comm: Comm, mine: torch.Tensor, slice_: torch.Tensor) -> torch.Tensor:
    values = mine if slice_.dtype is mine.dtype else mine.new_empty(mine.numel(), dtype=slice_.dtype)
    own = values.view(comm.world, -1)[comm.rank]
    if own.data_ptr() != slice_.data_ptr():
        own.copy_(slice_)
    comm.gather(values)
    return values
