"""What is measured: placements and update modes of the engine, and peers; and what bounds a step of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from . import peers
from .machine import Rates
from .models import Llama, Sizes

#: Of the parameters, as much as may be on the GPU at once where they are placed on the host.
ON_DEVICE: Final = 0.35
_CLIPPED: Final = {"max_grad_norm": 1.0}


class Traffic(NamedTuple):
    """Bytes for each parameter in a step. `exact`: neither more nor fewer; else no fewer."""

    h2d: float = 2
    d2h: float = 2
    dram: float = peers.ADAM
    read: float = 0
    written: float = 0
    exact: bool = True


class Case(NamedTuple):
    """One contestant.

    Attributes:
        what: in words, for the table.
        settings: of `infinity.Config`; None: it is a peer.
        peer: makes the peer.
        traffic: what it moves; None: nothing leaves the GPU.
        drives: how many there are.
        dilations: how many times slower the machine's clock runs: Python's part shows in the difference.
        steps: that are measured at the first of them; at the others it is one.
        traces: whether each number of tokens is traced; else one is.
    """

    what: str
    settings: Mapping[str, Any] | None = None
    peer: Callable[..., Any] | None = None
    traffic: Traffic | None = Traffic()
    drives: int = 1
    dilations: tuple[float, ...] = (1.0, 2.0, 8.0)
    steps: int = 2
    traces: bool = True

    def bounds(self, sizes: Sizes, tokens: int, rates: Rates) -> dict[str, float]:
        """Return the seconds for which a step needs each resource. The least that any schedule moves counts:
        an update is one pass of Adam."""
        compute = sizes.compute(tokens, rates.flops)
        n = sizes.parameters
        if self.traffic is None:
            return {"compute": compute + n * peers.ADAM / rates.hbm}
        on_host = self.settings is not None and self.settings.get("parameters") == "host"
        h2d = 2 * (2 - ON_DEVICE) if on_host else 2
        moved = {
            "compute": compute,
            "Adam": n * peers.ADAM / rates.dram,
            "link": n * max(h2d, self.traffic.d2h) / rates.link,
        }
        if self.traffic.read:
            most = max(self.traffic.read, self.traffic.written)
            moved["drives"] = n * most / (rates.drive * self.drives)
        return moved


def _reflow(model: Llama, machine: Any) -> peers.Reflow:
    return peers.Reflow(model, machine, clipped=False)


def _reflow_clipped(model: Llama, machine: Any) -> peers.Reflow:
    return peers.Reflow(model, machine, clipped=True)


#: An update, and the squares of bf16 gradients for their norm.
_ADAM_AND_NORM: Final = peers.ADAM + 2
_STATE_ON_DRIVES: Final = Traffic(dram=_ADAM_AND_NORM, read=12, written=12)
#: Of cases with little Python.
_SHORT: Final[dict[str, Any]] = {"dilations": (1.0, 2.0), "steps": 1}
#: Of cases whose steps take ten seconds and more.
_LONG: Final[dict[str, Any]] = {"dilations": (1.0,), "steps": 1, "traces": False}

CASES: Final[Mapping[str, Case]] = {
    "plain": Case("torch, all on the GPU", None, peers.Plain, None, **_SHORT),
    "overlap": Case(
        "`overlap`, every step clipped",
        {**_CLIPPED, "update": "overlap"},
        traffic=Traffic(dram=_ADAM_AND_NORM),
    ),
    "backward": Case(
        "`backward`", {"update": "backward", "accumulation": 1}, traffic=Traffic(dram=_ADAM_AND_NORM)
    ),
    "delayed": Case(
        "`delayed`, every step clipped",
        {**_CLIPPED, "update": "delayed"},
        traffic=Traffic(dram=_ADAM_AND_NORM),
    ),
    "parameters-on-host": Case(
        "`overlap`, parameters on the host",
        {**_CLIPPED, "update": "overlap", "parameters": "host"},
        traffic=Traffic(h2d=2, dram=_ADAM_AND_NORM, exact=False),
        dilations=(1.0, 2.0),
    ),
    "state-on-4-drives": Case(
        "`overlap`, state on 4 drives",
        {**_CLIPPED, "update": "overlap", "optimizer_state": "nvme"},
        traffic=_STATE_ON_DRIVES,
        drives=4,
        **_LONG,
    ),
    "state-on-1-drive": Case(
        "`overlap`, state on one drive",
        {**_CLIPPED, "update": "overlap", "optimizer_state": "nvme"},
        traffic=_STATE_ON_DRIVES,
        **_LONG,
    ),
    "zero-offload": Case("ZeRO-Offload", None, peers.ZeroOffload, **_SHORT),
    "fsdp2": Case("FSDP2, CPU offload", None, peers.FSDP2, Traffic(h2d=4), **_SHORT),
    "reflow": Case(
        "Reflow, nothing clipped", None, _reflow, Traffic(dram=peers.PUBLISH + peers.COMMIT), **_SHORT
    ),
    "reflow-clipped": Case(
        "Reflow, every step clipped",
        None,
        _reflow_clipped,
        Traffic(h2d=4, dram=2 * peers.PUBLISH + peers.COMMIT),
        **_SHORT,
    ),
}
