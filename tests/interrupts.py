"""A training loop that is interrupted once, somewhere, and goes on as a user would.

CPython runs Python's signal handlers on the main thread where a function begins, at backward jumps and
when a call returns. `run` raises an exception at one such point in the engine's files (or sends a signal at
some moment), each time in a child that has run nothing before. What comes after is compared with a plain
model bit for bit. Every outcome is right values, a typed error, or a failure: wrong values, another error,
something lost, a hang.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.api.engine import engine_of
from infinity.core import handlers
from infinity.core.errors import InfinityError

from . import children, inner
from .masters import Masters

PACKAGE = os.path.dirname(infinity.__file__)
STANDARD = tuple(os.path.dirname(os.__file__) + f"/{n}.py" for n in ("threading", "contextlib", "weakref"))
WIDTH = 32
#: Seconds that a child may take.
LIMIT = 60
NVME = {"parameters": "nvme", "optimizer_state": "nvme", "gradients": "nvme"}
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {**NVME, "device_memory": "900KiB", "update_depth": 1, "read_ahead_memory": 0},
    {**NVME, "device_memory": "1200KiB"},
    {"parameters": "host", "optimizer_state": "host", "gradients": "host", "device_memory": "900KiB"},
    {"parameters": "device", "optimizer_state": "nvme", "gradients": "nvme"},
    {"parameters": "device", "optimizer_state": "device", "gradients": "device"},
    {
        "parameters": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        "optimizer_state": {"device": 0.2, "host": 0.3, "nvme": 0.5},
        "gradients": {"host": 0.5, "nvme": 0.5},
    },
)


#: What a user does between steps.
ACTIONS = ("accumulate", "evaluate", "look", "save", "load", "edit", "flush")


class Interrupt(KeyboardInterrupt):
    """What a signal handler raises."""


class Net(nn.Module):
    """A root with a parameter of its own, a tied weight, one layer of two chunks. `x` (batch, WIDTH)."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.wide = nn.Linear(WIDTH, 2100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = x.tanh()
        return self.wide(x)


def loss_of(net: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(seed))
    return net(x).square().mean()  # type: ignore[no-any-return]


class Plain:
    """θ_t = Adam(θ_{t−1}, ∇L_t(θ_{t−1})), or of θ_{t−2} where updates are delayed."""

    def __init__(self, net: nn.Module, delayed: bool) -> None:
        self.net, self.delayed, self.steps = net, delayed, 0
        self.masters = Masters(net, torch.optim.AdamW(net.parameters(), lr=1e-2), torch.float32)
        self.flush()

    @property
    def newest(self) -> dict[str, torch.Tensor]:
        return self.masters.values

    def show(self, values: dict[str, torch.Tensor]) -> nn.Module:
        for name, param in self.masters.params.items():
            param.data = values[name].clone()
        return self.net

    def norm(self) -> float:
        return float(torch.cat([p.grad.flatten().double() for p in self.net.parameters()]).norm())  # type: ignore[union-attr]

    def step(self, scale: float) -> None:
        """Make a step with the gradients that are there, times `scale`."""
        before = copy.deepcopy(self.newest)
        for name, param in self.masters.params.items():
            self.masters.update(name, param.grad, scale)  # type: ignore[arg-type]
        self.front = before if self.delayed else copy.deepcopy(self.newest)
        self.steps += 1

    def flush(self) -> None:
        self.front = copy.deepcopy(self.newest)


class User:
    """What a user does, and what must come of it. `redo` is called after an interrupt."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = rng = random.Random(seed)
        torch.manual_seed(seed)
        update = ("sync", "overlap", "delayed")[seed % 3]
        recompute = rng.random() < 0.4
        settings = dict(PLACEMENTS[seed // 3 % len(PLACEMENTS)])
        if recompute and rng.random() < 0.7:
            settings.update(activations="host", activation_memory="1MiB")
        self.clip = rng.choice((None, 0.05))
        net = Net(recompute)
        self.plain = Plain(copy.deepcopy(net), update == "delayed")
        defaults = {"device_memory": "8MiB", "host_memory": "64MiB", "chunk_elements": 65536}
        config = inner.config(
            **{
                **defaults,
                **settings,
                "nvme": folder,
                "device": "cpu",
                "dtype": "fp32",
                "update": update,
                "delay_warmup_steps": 0,
                "max_grad_norm": self.clip,
            }
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.model, self.adam = infinity.wrap(net, optimizer, config)
        self.engine = engine_of(self.model)
        self.at = ""
        self.seed = 0
        self.saved: Any = None
        self.said = f"{update}, {settings}, clip {self.clip}"

    def check(self, right: bool, what: str) -> None:
        if not right:
            raise AssertionError(f"{what} (at {self.at})")

    # -- the pieces of a round ---------------------------------------------------------------

    def train(self) -> None:
        """One step; after an interrupt it has happened or it has not, and `steps` says which."""
        while self.adam.steps == self.plain.steps:
            net = self.plain.show(self.plain.front)
            net.zero_grad()
            wanted = loss_of(net, self.seed)
            wanted.backward()
            try:
                loss = loss_of(self.model, self.seed)
                self.check(torch.equal(loss, wanted), "another loss")
                loss.backward()
                self.adam.step()
                self.adam.zero_grad()
            except Interrupt:
                self.at += " " + "train"
                self.check(torch.is_grad_enabled(), "grad mode is off")
                self.adam.zero_grad()
        scale = 1.0
        if self.clip is not None:
            norm = infinity.metrics(self.adam)["grad_norm"]
            self.check(abs(norm - self.plain.norm()) < 1e-5 * norm, "another norm")
            scale = min(1.0, self.clip / (norm + 1e-6))
        with calm():
            self.plain.step(scale)
        self.seed += 1
        self.check(self.adam.steps == self.plain.steps, "steps that nobody made")

    def accumulate(self) -> None:
        """Two backwards that are thrown away."""
        loss_of(self.model, 98).backward()
        loss_of(self.model, 99).backward()
        self.adam.zero_grad(set_to_none=False)
        self.model.zero_grad()

    def evaluate(self) -> None:
        wanted = loss_of(self.plain.show(self.plain.newest), 97)
        with torch.no_grad():
            found = loss_of(self.model.eval(), 97)
        self.model.train()
        self.check(torch.equal(found, wanted), "another loss in eval")

    def look(self) -> None:
        with infinity.gathered(self.model):
            for param, wanted in zip(self.model.parameters(), self.plain.newest.values(), strict=True):
                self.check(torch.equal(param, wanted), "another value in gathered")

    def save(self) -> None:
        plain = self.plain
        weights = {n: v.clone() for n, v in self.model.state_dict().items()}
        states = self.adam.state_dict()
        for name, wanted in plain.newest.items():
            self.check(torch.equal(weights[name], wanted), f"another {name} in the state dict")
        steps = plain.masters.steps
        for state, name in zip(states["state"].values(), steps, strict=any(steps.values())):
            self.check(int(state["step"]) == steps[name], "another step in the state dict")
            for kind, wanted in plain.masters.wide(name).items():
                self.check(torch.equal(state[kind].flatten(), wanted), f"another {kind}")
        # A state dict of delayed updates has what the next forward uses.
        front = {name: value.clone() for name, value in plain.front.items()}
        self.saved = (weights, states, plain.masters.saved(), front, plain.steps)

    def load(self) -> None:
        if self.saved is None:
            return
        weights, states, masters, front, steps = self.saved
        self.model.load_state_dict(weights)
        self.adam.load_state_dict(states)
        self.plain.masters.restore(masters)
        self.plain.steps = steps  # goes with the state dict
        self.plain.front = {name: value.clone() for name, value in front.items()}

    def edit(self) -> None:
        """Set one parameter. Doing it again does no harm."""
        with infinity.gathered(self.model.layers[1].weight, write=True), torch.no_grad():
            self.model.layers[1].weight.fill_(0.25)
        self.plain.newest["layers.1.weight"].fill_(0.25)
        self.plain.flush()

    def flush(self) -> None:
        infinity.flush(self.adam)
        self.plain.flush()

    def close(self) -> None:
        infinity.close(self.adam)

    # -- the whole ---------------------------------------------------------------------------

    def run(self) -> None:
        others = self.random.sample(ACTIONS, 3)
        plan = ["train", "train", others[0], "train", others[1], "train", others[2]]
        try:
            for name in plan:
                while True:
                    self.at = name
                    try:
                        getattr(self, name)()
                        break
                    except Interrupt:
                        self.at = f"{name}, interrupted"
                        self.model.train()
            with calm():
                self.at = "the end"
                self.train()
                self.save()
                self.look()
                self.balance()
            self.at = "close"
        finally:
            try:
                self.close()
            except Interrupt:
                self.close()

    def balance(self) -> None:
        """What was lent is home, and what is on the device is what the books say."""
        self.adam.zero_grad()
        infinity.flush(self.adam)
        self.engine.updater.drop_ahead()
        gc.collect()
        self.check(not any(u.keepers for u in self.engine.units), "a claim that nobody has")
        pools, until = self.engine.pool.stats, time.monotonic() + 5
        while time.monotonic() < until and any(q.in_use for q in pools().values()):
            time.sleep(0.01)
        self.check(not any(q.in_use for q in pools().values()), "leases that nobody has")
        self.check(not self.engine.store._order.pending(), "a transfer that nobody sees to")
        activations = self.engine.activations
        self.check(activations is None or not activations.in_use, "activations that nobody has")
        units = [u for u in self.engine.units if not u.on_device and u.state.value != "sharded"]
        held = sum(u.layout.gathered_nbytes for u in units)
        self.check(self.engine.residency.cache.allocated == held, "bytes that no unit has")


# -- where the exception comes ------------------------------------------------------------------

Point = tuple[str, int, int]


class Tracer:
    """Notes the points where a handler could run; raises where one is passed for the `at`th time."""

    def __init__(self, where: Point | None = None, at: int = 1) -> None:
        self.seen: list[Point] = []
        self.at, self.where = at, where
        self.fired = ""
        self.on = False
        self._points: dict[CodeType, frozenset[int]] = {}

    def start(self) -> None:
        self.on = True
        sys.settrace(self._call)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._ours(frame.f_code):
                frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = self._local, True, False
            frame = frame.f_back

    def stop(self) -> None:
        self.on = False
        sys.settrace(None)

    def _ours(self, code: CodeType) -> bool:
        return code.co_filename.startswith(PACKAGE) or (
            code.co_filename == __file__ and code.co_name in (*ACTIONS, "train")
        )

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if not self._ours(code):
            caller = frame.f_back
            if not (code.co_filename in STANDARD and caller is not None and caller.f_trace is not None):
                return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if code not in self._points:
            self._points[code] = frozenset(points_of(code))
        if not code.co_flags & 0x20:  # a generator that goes on
            self._point(frame, -1)
        return self._local

    def _local(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and frame.f_lasti in self._points[frame.f_code]:
            self._point(frame, frame.f_lasti)
        return self._local

    def _point(self, frame: FrameType, offset: int) -> None:
        if not self.on:
            return
        code = frame.f_code
        point = (code.co_filename, code.co_firstlineno, offset)
        self.seen.append(point)
        if self.where != point:
            return
        self.at -= 1
        if self.at == 0:
            self.on = False
            self.fired = f"{os.path.relpath(code.co_filename, PACKAGE)}:{frame.f_lineno} {code.co_name}"
            handlers._Deferring(self._raise)(0, frame)  # in a commit it waits, as every handler does

    def _raise(self, number: int, frame: object) -> None:
        raise Interrupt(self.fired)


def points_of(code: CodeType) -> Iterator[int]:
    """Yield the offsets of instructions before which CPython may have run a handler."""
    table = {}
    if hasattr(dis, "_parse_exception_table"):
        for entry in dis._parse_exception_table(code):
            for at in range(entry.start, entry.end, 2):
                table[at] = entry.target
    before: Any = None
    for this in dis.get_instructions(code):
        name = this.opname
        if before is not None and (before.opname.startswith("CALL") or before.opname == "RESUME"):
            # The handler runs within the call; an exception here must meet the same `except`.
            if table.get(before.offset) == table.get(this.offset):
                yield this.offset
        elif "JUMP" in name and "BACKWARD" in name and "NO_INTERRUPT" not in name:
            yield this.offset
        if this.opname != "CACHE":
            before = this


_tracer: Tracer | None = None
_calm = False


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Have no exception come inside the block."""
    global _calm
    armed = _tracer is not None and _tracer.on
    if armed:
        _tracer.stop()
    before, _calm = _calm, True
    try:
        yield
    finally:
        _calm = before
        if armed:
            _tracer.start()


# -- children -----------------------------------------------------------------------------------


def child(seed: int, kind: str, at: int, where: Point | None, folder: Path) -> dict[str, Any]:
    """Run a user's loop. `traced`: with an exception at the `at`th time of a point (None: at none); `signal`:
    with one from a handler after `at` microseconds (0: never)."""
    global _tracer
    torch.set_num_threads(1)
    user = User(seed, folder)
    outcome: dict[str, Any] = {"what": user.said, "result": "right", "fired": ""}
    if kind == "signal":

        def handler(number: int, frame: FrameType | None) -> None:
            if _calm:
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                return
            outcome["fired"] = traceback.format_stack(frame, limit=1)[0].strip()
            raise Interrupt("signal")

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, at / 1e6)
    else:
        _tracer = Tracer(where, at)
        _tracer.start()
    begin = time.monotonic()
    try:
        user.run()
    except BaseException as error:  # an Interrupt: in `close`, twice
        result = "typed" if isinstance(error, InfinityError) else "failed"
        outcome.update(result=result, trace=traceback.format_exc()[-4000:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.settrace(None)
    outcome.update(seconds=time.monotonic() - begin, at=user.at)
    if _tracer is not None:
        outcome["fired"] = _tracer.fired
        outcome["seen"] = [] if where else _tracer.seen
    return outcome


def in_child(seed: int, kind: str, at: int, where: Point | None) -> dict[str, Any]:
    """Return what `child` returns in a process of its own, or how that ended."""
    given = json.dumps([seed, kind, at, where])
    with tempfile.TemporaryDirectory(prefix="infinity-interrupts-") as folder:
        done = children.run(
            [sys.executable, "-m", "tests.interrupts", given, folder],
            **{"timeout": LIMIT + 10, "cwd": children.ROOT, "text": True, "imports": ["tests.masters"]},
        )
        out = Path(folder, "outcome.json")
        result: dict[str, Any] = {"result": "failed", "error": f"a hang or a crash ({done.returncode})"}
        result = json.loads(out.read_text()) if out.exists() else {**result, "fired": ""}
    return {**result, "log": (done.stdout + done.stderr)[-6000:]}


#: Runs that nothing interrupted, by kind and placement: where points are, and how long it takes.
_whole: dict[tuple[str, int], dict[str, Any]] = {}


def run(seed: int, kind: str) -> dict[str, Any]:
    """Interrupt the run of `seed`: at a point (`traced`), or at a moment (`signal`)."""
    rng = random.Random(f"{kind} {seed}")
    key = kind, seed % (3 * len(PLACEMENTS))
    if key not in _whole:
        _whole[key] = in_child(seed, kind, 0, None)
    whole = result = _whole[key]
    while not result["fired"] and result["result"] == "right":
        if kind == "signal":
            where, at = None, rng.randint(1, round(whole["seconds"] * 1e6))
        else:  # places that are passed seldom get their turn, too
            where = rng.choice(sorted({tuple(p) for p in whole["seen"]}))
            at = rng.randint(1, whole["seen"].count(list(where)))
        result = in_child(seed, kind, at, where)
    return {"seed": seed, "kind": kind, **result, "seen": ()}


def main() -> None:
    """Run `child` as `in_child` asks."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    (seed, kind, at, where), folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    (folder / "nvme").mkdir()
    outcome = child(seed, kind, at, tuple(where) if where else None, folder / "nvme")
    (folder / "outcome.json").write_text(json.dumps(outcome))
    os._exit(0)


if __name__ == "__main__":
    main()
