"""Takes one point of synchronisation after the other out of the engine, and looks whether the lagging device
finds that.

    python -m tests.lagging.mutations            tries what mutations.md does not have, and writes it
    python -m tests.lagging.mutations NAME …     tries these points as mutations.md says; writes nothing

A *point* is a place in the source of the engine where something waits: found by its form (`_found`), and
named by file, function and text, so that it keeps its name when lines move. A *mutant* is the engine without
one point. It is *caught* if a case of run.py ends with a finding, an error, other bits or not at all. Nothing
is written into infinity/: a mutant is a forked process in which the code of one function is another one
(`run.py --without NAME`). Host streams and I/O are late at random there, so that a missing wait of the host
shows each time, too.

mutations.md says of each point that no case catches why it stays, as far as that is known, and where the
mutant was tried. "No case comes to it" is measured; what is "probably" so was read, and not shown. Who adds a
wait to the engine runs the first of the commands above. Where nothing catches the mutant, a scenario is
missing in programs.py, or the wait is not needed, or the table has to say why it stays.

Left out are:
- what the CUDA path never runs: hardware/host_device.py, infinity/cli, and what only several ranks run
  (params/gather.py, grads/rank_gradients.py, reduction.py, hardware/comm.py, `_OF_RANKS`);
- waits inside of storage/ and hardware/aio.py, which are between the engine and the kernel and have tests of
  their own; what other folders wait for there is in the table, and what the pool waits for before it lends;
- bells: a thread that sleeps on one looks again whether it may go on, so a bell orders nothing;
- locks: they guard what Python knows, and no memory of the device;
- leases that come home too early: that is what a lease's last wait is for, and the mutant without it;
- what an interrupt, a failed transfer or a failed `wrap` left (`_EARLY_ENDS`): tests/ has those elsewhere;
- clocks of traces, which are a matter of time alone.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import re
import signal
import sys
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import infinity

from ..ranks import run_ranks

TABLE = Path(__file__).with_name("mutations.md")
_ENGINE = Path(infinity.__file__).parent
_FILES = (
    "api/engine.py",
    "api/gathered.py",
    "autograd/activations.py",
    "autograd/phases.py",
    "core/commits.py",
    "grads/buffer.py",
    "grads/gradient_chunks.py",
    "grads/gradients.py",
    "hardware/cuda_device.py",
    "hardware/streams.py",
    "optim/chunk_io.py",
    "optim/leaving.py",
    "optim/matrices.py",
    "optim/optimizer.py",
    "optim/state_io.py",
    "optim/update.py",
    "params/cache.py",
    "params/load.py",
    "params/param.py",
    "params/publish.py",
    "params/residency.py",
    "params/unit.py",
    "params/unit_memory.py",
    "params/updates.py",
    "storage/pinned.py",
)
_EARLY_ENDS = {
    "Engine._make",  # a `wrap` that fails
    "GradientIO.close",  # what comes has been waited for, but after an error; a write holds its lease itself
    "HostStream.synchronize",
    "Task.pause",
    "_Worker._count",
}
_OF_RANKS = {
    "CudaDevice.synchronize: self._aside.synchronize()",
    "Matrices.collect",
    "Matrices.take",
    "ParamUnit._wait_load: self._gather.wait()",
    "Residency._gather_first",
    "UnitBuffer.drop",
    "UnitBuffer.join",
    "UnitBuffer.merge",
    "UnitBuffer.widen",
}
#: Where a mutant is tried, in this order: cheap cases first, each of another kind.
_TRIED = (
    *("device-host-nvme", "looks-delayed", "streams-host", "nvme-nvme-nvme", "delayed-device", "looks-nvme"),
    *("host-device-device", "interleaved-activations", "routes-host", "left_open-nvme", "two_threads-device"),
    *("delayed-nvme", "fp16", "device-device-device", "host-host-host", "activations", "looks-device"),
    *("streams-delayed-device", "looks-delayed-device", "host-nvme-device", "host-device-nvme"),
    *("left_open-activations", "beside-activations", "behind_steps-device", "behind_steps-delayed"),
    *("behind_steps-delayed-device", "behind_steps-delayed-tight", "behind_steps-gradients"),
    *("behind_steps-host", "within-device", "within-host", "held-device", "held-host"),
    *("looks-gradients", "chunks-split", "backward-device-device-device", "backward-host-host-device"),
    *("raises-host", "raises-nvme", "halves-device-host-host", "halves-host-device-device"),
    *("muon-tight", "muon-device-host-host"),
)
SECONDS = 60.0  # that a case may take; it takes 1 or 2 of a core
_BELLS = {"_bell", "_changed", "_home"}


class Point(NamedTuple):
    """One place that waits. `parent`, `field` and `at` say where the expression `node` is in the tree."""

    name: str
    what: str
    line: int
    parent: ast.AST
    field: str
    at: int | None
    node: ast.expr
    instead: ast.expr

    def put(self, node: ast.expr) -> None:
        """Have `node` in the tree in the place of this one."""
        ast.copy_location(node, self.node)
        if self.at is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.at] = node
        ast.fix_missing_locations(node)


# -- what is a point ------------------------------------------------------------------------

#: Statements that are taken out; what they are given is evaluated all the same. And what that is, in words.
_STATEMENTS = {
    "wait_on_device": "the device's wait",
    "wait_stream": "a stream's wait for another",
    "wait_event": "a stream's wait",
    "record_stream": "the allocator is not told of a stream",
    "uses": "the allocator is not told of a stream",
    "used": "nobody notes who has used the memory",
    "synchronize": "the host's wait for streams",
    "wait": "the host's wait",
    "wait_over": "the host's wait",
    "_wait": "the wait",
    "_wait_load": "the wait for a unit's load",
    "wait_read": "the wait for loads that read the host",
    "wait_unread": "the wait for copies that read the host",
    "wait_published": "the wait for a copy of the back",
    "wait_copied": "the wait for a copy to the device",
    "wait_unit": "the wait for a unit's update",
    "wait_all": "the wait for updates",
    "_wait_update": "the wait for a parameter's update",
    "_resume": "the wait for values on the device",
    "resume_all": "the wait for values on the device",
    "expect": "nobody is told to wait",
    "expect_updates": "nobody is told to wait",
    "quiesce": "the wait for updates",
    "let_go": "the wait for buffers that leave",
    "keep_clear": "the wait for an update that reads it",
    "finish_writes": "the wait for writes",
    "_wait_for_holder": "the engine lock",
    "enter": "the engine lock",
    "begin": "the engine lock",
}
#: Expressions that have another value instead.
_VALUES: dict[str, tuple[str, Any]] = {
    "mark": ("the mark: what follows comes after nothing", None),
    "wait": ("the host's wait", True),
    "done": ("the look at an event", True),
    "is_over": ("the look at an event", True),
    "blocks_load": ("the look at updates", False),
    "has_unit": ("the look at updates", False),
    "has_chunk": ("the look at updates", False),
}


def _text(node: ast.AST) -> str:
    """Return what is called, without what that is given."""
    if isinstance(node, ast.Attribute):
        return f"{_text(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{_text(node.func)}(…)"
    if isinstance(node, ast.Subscript):
        return f"{_text(node.value)}[…]"
    return ast.unparse(node)


def _calls_in(nodes: Collection[ast.expr]) -> ast.expr:
    """Return what evaluates those of `nodes` that call something, and nothing else."""
    calls = [n for n in nodes if any(isinstance(each, ast.Call) for each in ast.walk(n))]
    return ast.Tuple(calls, ast.Load()) if calls else ast.Constant(None)


def _nothing() -> ast.expr:
    return ast.parse("__import__('contextlib').nullcontext", mode="eval").body


def _of(node: ast.AST, parent: ast.AST) -> tuple[str, str, ast.expr] | None:
    """Return text, what is taken away and what is there instead, if `node` is a point."""
    if isinstance(parent, ast.keyword) and parent.arg == "there" and not isinstance(node, ast.Name):
        return f"there={_text(node)}", "the worker's own stream", _nothing()
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = _text(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    text = f"{owner}.{name}" if owner else name
    given = ", ".join(_text(a) for a in node.args)
    if isinstance(parent, ast.withitem) and name == "there":
        return f"{text}()", "the stream that it was made on", ast.Call(_nothing(), [], [])
    if owner.rpartition(".")[2] in _BELLS or (name == "begin" and not owner.endswith("commits")):
        return None
    if (name == "enter" and not owner.endswith("commits")) or (name == "expect" and owner != "unit"):
        return None
    if isinstance(parent, ast.Expr):
        if name == "wait_for" and given.endswith(".wait_loaded"):
            return f"{text}({given})", "the wait for a unit's load", ast.Constant(None)
        if name == "callback" and given in ("device.close", "activations.close", "close"):
            return f"{text}({given})", "the wait before the end", ast.Constant(None)
        if name in _STATEMENTS:
            inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return f"{text}({given})", _STATEMENTS[name], _calls_in([*inner, *node.args])
        return None
    if name == "wait_issued" and isinstance(node.func, ast.Attribute):
        event = ast.Attribute(node.func.value, "event", ast.Load())
        return f"{text}()", "the wait until copies are issued", event
    if name in _VALUES and not (name == "wait" and not owner):
        what, value = _VALUES[name]
        return f"{text}({given})", what, ast.Constant(value)
    return None


def _found(tree: ast.AST, file: str) -> Iterator[Point]:
    """Yield the points of a file, but without numbers where several have one name."""

    def within(node: ast.AST, names: tuple[str, ...], line: int) -> Iterator[Point]:
        for field, value in ast.iter_fields(node):
            for at, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(each, ast.AST):
                    continue
                inside, first = names, line
                if isinstance(each, ast.ClassDef) and not line:
                    inside = (*names, each.name)
                elif isinstance(each, ast.FunctionDef) and not line:
                    inside = (*names, each.name)
                    first = min([each.lineno, *(d.lineno for d in each.decorator_list)])
                function = ".".join(inside)
                if first and (of := _of(each, node)) is not None:
                    yield from at_(each, function, first, *of, (node, field, at))
                if first and isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                    yield from copied(each, function, first, (node, field, at))
                yield from within(each, inside, first)

    def at_(
        node: Any, function: str, line: int, text: str, what: str, instead: ast.expr, place: Any
    ) -> Iterator[Point]:
        if not {function, f"{function}: {text}"} & (_EARLY_ENDS | _OF_RANKS):
            yield Point(f"{file} {function}: {text}", what, line, *place, node, instead)

    def copied(call: Any, function: str, line: int, place: Any) -> Iterator[Point]:
        """What copies come after, but marks that are made there."""
        name = call.func.attr
        if name not in ("h2d", "d2h"):
            return
        for at, given in enumerate(call.args[2:], 2):
            if not isinstance(given, ast.Call):
                text, what = f"{name}(…, {_text(given)})", "what the copy comes after"
                yield from at_(given, function, line, text, what, ast.Constant(None), (call, "args", at))

    yield from within(tree, (), 0)


def points(file: str) -> dict[str, Point]:
    """Return the points of a file by their names, in a tree of their own each time."""
    path = _ENGINE / file
    tree = ast.parse(path.read_text(), str(path))
    numbers: collections.Counter[str] = collections.Counter()
    named: dict[str, Point] = {}
    for point in _found(tree, file):
        numbers[point.name] += 1
        n = numbers[point.name]
        named[point.name + (f" ({n})" if n > 1 else "")] = point
    _trees[file] = tree
    return named


def all_points() -> dict[str, str]:
    """Return what is taken away at each point, by its name."""
    return {name: point.what for file in _FILES for name, point in points(file).items()}


# -- mutants --------------------------------------------------------------------------------

_trees: dict[str, ast.Module] = {}  # of `points`, by file


def _functions(module: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a module, and of its classes, without what decorators have put around them."""
    things = list(vars(module).values())
    things += [each for t in things if isinstance(t, type) for each in vars(t).values()]
    for thing in things:
        each: Any = thing
        if isinstance(each, property):
            each = each.fget
        each = getattr(each, "__func__", each)
        while hasattr(each, "__wrapped__"):
            each = each.__wrapped__
        if isinstance(each, types.FunctionType) and each.__module__ == module.__name__:
            yield each


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _replace(file: str, lines: Collection[int]) -> None:
    """Give the functions of `file` that begin at one of `lines` the code of its tree."""
    module = importlib.import_module("infinity." + file.removesuffix(".py").replace("/", "."))
    made = compile(_trees[file], module.__file__ or "", "exec")
    new = {(c.co_name, c.co_firstlineno): c for c in _codes(made) if c.co_firstlineno in lines}
    done = set()
    for function in _functions(module):
        key = function.__code__.co_name, function.__code__.co_firstlineno
        if key in new:
            function.__code__ = new[key]
            done.add(key[1])
    assert done == set(lines), f"{file}: no function at {set(lines) - done}"


def mutate(name: str) -> None:
    """Take a point out of this process's engine."""
    file = name.partition(" ")[0]
    point = points(file)[name]
    point.put(point.instead)
    _replace(file, [point.line])


# -- processes ------------------------------------------------------------------------------


def found_in(name: str, case: str, schedule: str = "late", seed: int = 0) -> str:
    """Return what a case finds in the engine without a point; "" is nothing."""
    script = "from tests.lagging.run import main\nmain()"
    given = "--schedule", schedule, "--seed", str(seed), "--without", name, case
    imports = ["tests.lagging.run", "tests.lagging.mutations"]
    ((code, out, err),) = run_ranks(1, script, *given, seconds=SECONDS, imports=imports, device="cpu")
    if code == 0:
        return ""
    return out.strip() or ("no end" if code == -signal.SIGKILL else f"exit code {code}: {err[-2000:]}")


# -- the table ------------------------------------------------------------------------------

_ROW = re.compile(r"\| `(.+)` \| (.+) \| (.+) \|")
_HEAD = """# What happens without a point of synchronisation

Made by `python -m tests.lagging.mutations`, whose docstring says what is in it. A name is that of a file, a
function, and what stands there. In the last column is the case that catches the mutant with its schedule, or
why none does.

| point | what is taken away | caught by |
|---|---|---|
"""
NOT_CAUGHT = "not caught: "
_UNKNOWN = NOT_CAUGHT + "nobody has said why"


def table() -> dict[str, str]:
    """Return what catches each point, or why nothing does, by its name."""
    rows = _ROW.findall(TABLE.read_text()) if TABLE.exists() else []
    return {name: caught for name, _, caught in rows}


def _write(rows: dict[str, str]) -> None:
    lines = [f"| `{n}` | {what} | {rows[n]} |\n" for n, what in all_points().items() if n in rows]
    TABLE.write_text(_HEAD + "".join(lines))


def caught_by(name: str) -> tuple[str, str, int] | None:
    """Return case, schedule and seed of what the table says catches a point."""
    says = table()[name]
    if says.startswith(NOT_CAUGHT):
        return None
    case, schedule, *seed = says.split()
    return case.rstrip(","), schedule, int(seed[0]) if seed else 0


def _make() -> None:
    rows, wanted = table(), all_points()
    for name in wanted:
        if rows.get(name, _UNKNOWN) != _UNKNOWN:
            continue
        rows[name] = _UNKNOWN
        for case in _TRIED:
            if found := found_in(name, case):
                rows[name] = f"{case}, late"
                break
        print(f"{name}\n    {rows[name]}  {found.partition(chr(10))[0][:120]}", flush=True)  # noqa: T201
        _write({n: rows[n] for n in wanted if n in rows})
    _write({n: rows[n] for n in wanted})


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*")
    given = parser.parse_args()
    if not given.names:
        _make()
        return 0
    lost = 0
    for name in given.names:
        by = caught_by(name)
        found = found_in(name, *by) if by else "not caught"
        lost += not found
        sys.stdout.write(f"{name}: {found or 'nothing'}\n")
        sys.stdout.flush()
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
