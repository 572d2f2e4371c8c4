"""Ranks: what they compute, and what each is told when another fails, ends, stops or does something else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infinity.core.errors import ConfigError
from infinity.hardware.comm import Alone, connect

from .ranks import Result, all_well, free_port, run_ranks

pytestmark = pytest.mark.processes

START = """
import functools, json, os, signal, sys, time
import torch
import torch.distributed as dist
from infinity.core.errors import InfinityError, RankError, DivergenceError, ConfigError, ClosedError
from infinity.hardware.comm import Alone, Comm, connect

CPU = torch.device("cpu")
DO = {
    "exchange": lambda c: c.exchange("the step"),
    "gather": lambda c: c.gather(torch.zeros(c.world * 100_000)),
    "reduce": lambda c: c.reduce(torch.zeros(c.world * 100_000)),
    "broadcast": lambda c: c.broadcast(torch.zeros(100_000), 1),
}
def told(call, *arguments):
    try:
        call(*arguments)
    except InfinityError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
    else:
        print('["", ""]', flush=True)
"""


def errors(result: Result) -> list[tuple[str, str]]:
    """Return (type, text) of what `told` printed; fail if the rank did not end by itself, and well."""
    code, out, err = result
    assert code == 0, f"exited with {code}:\n{out}\n{err}"
    assert "terminate" not in err
    return [tuple(json.loads(line)) for line in out.splitlines()]


def the_error(result: Result) -> tuple[str, str]:
    (error,) = errors(result)
    return error


@pytest.mark.first
@pytest.mark.parametrize("world", [3, 1])
def test_what_ranks_compute(world: int) -> None:
    """Bit for bit: a mean is the fp32 sum in the order of the ranks, divided once."""
    script = """
comm = connect(device=CPU)
rank, world = comm.rank, comm.world
assert isinstance(comm, Alone) == (world == 1)
assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
assert (comm.local_rank, comm.local_world) == (rank, world)
for sizes in ([0], [3], [743], [744], [745], [0, 1, 5000, 300_000]):
    values = [bytes([r]) * sizes[r % len(sizes)] for r in range(world)]
    assert comm.exchange("a long name " * 50, values[rank]) == values
numel = 2_200_032 // world  # more than come at once, in fp32
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    given = torch.randn(world, world * numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = torch.zeros(numel)
    for r in range(world):
        want += given[r].view(world, -1)[rank].float()
    want /= world
    got = comm.reduce(given[rank].clone())
    assert got.dtype == torch.float32 and torch.equal(got, want)
    run = given[rank].clone()
    got = comm.reduce(run, narrow=True)
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    assert got.data_ptr() == run.view(world, -1)[rank].data_ptr()
    run = torch.zeros_like(given[0])
    run.view(world, -1)[rank] = given[0].view(world, -1)[rank]
    comm.gather(run)
    assert torch.equal(run, given[0])
    flat = given[rank].clone()
    comm.broadcast(flat, world - 1)
    assert torch.equal(flat, given[-1])
for dtype in (torch.int64, torch.bool, torch.float64):
    run = torch.zeros(world * 3).to(dtype)
    run.view(world, -1)[rank] = torch.tensor([1, 0, rank]).to(dtype)
    comm.gather(run)
    assert torch.equal(run, torch.tensor([[1, 0, r] for r in range(world)]).view(-1).to(dtype))
comm.gather(torch.zeros(0))
assert comm.reduce(torch.zeros(0)).numel() == 0
with torch.inference_mode():
    comm.gather(torch.zeros(world))
comm.reduce(torch.nn.Parameter(torch.zeros(world)))
total = 0.1
for r in range(1, world):
    total += 0.1 * 3**r
assert comm.total(0.1 * 3**rank) == total
if world > 1:  # pieces of any sizes, also of none
    sizes = [[(3 * i + j) % 4 * (i != 1 or j == 0) for j in range(world)] for i in range(world)]
    mine, theirs = sizes[rank], [row[rank] for row in sizes]
    of = torch.cat([torch.full((n,), 10.0 * rank + j) for j, n in enumerate(mine)]).bfloat16()
    to = torch.empty(sum(theirs), dtype=torch.bfloat16)
    sent = comm.sent
    comm.all_to_all(to, of, theirs, mine)
    assert comm.sent - sent == 2 * (sum(mine) - mine[rank])
    wanted = [torch.full((n,), 10.0 * i + rank) for i, n in enumerate(theirs)]
    assert torch.equal(to, torch.cat(wanted).bfloat16()), to
comm.close()
comm.close()
assert world == 1 or dist.is_initialized()  # until the process ends
if world > 1:
    told(comm.exchange, "after the end")
"""
    for result in run_ranks(world, START + script):
        assert [kind for kind, _ in errors(result)] == ["ClosedError"] * (world > 1)


@pytest.mark.integration
def test_memory_of_collectives() -> None:
    """A gather takes none; a reduce its output, if that has another dtype, pieces of what comes, and some
    pages."""
    script = """
def pages(name):
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(name))
def peak(call, run):
    for _ in range(2):  # what gloo keeps, it has after the first
        before = pages("VmRSS:")
        open("/proc/self/clear_refs", "w").write("5")
        call(run)
        more = pages("VmHWM:") - before
    return more
comm = connect(device=CPU)
run = torch.ones(comm.world << 23, dtype=torch.bfloat16)
narrow = functools.partial(comm.reduce, narrow=True)
print(json.dumps([peak(comm.gather, run), peak(comm.reduce, run), peak(narrow, run)]))
"""
    for out in all_well(run_ranks(3, START + script)):
        gather, reduce, narrow = json.loads(out)
        assert gather < 4 << 20
        assert reduce < (4 << 23) + (12 << 20)
        assert narrow < 12 << 20


@pytest.mark.integration
def test_where_ranks_come_from() -> None:
    script = """
comm = connect(device=CPU)  # torchrun's environment
assert dist.is_initialized() and comm.world == 4
comm.close()
dist.destroy_process_group()  # which connect made, and its user may end

os.environ["MASTER_PORT"] = sys.argv[1]
dist.init_process_group("gloo")
for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
from torch.distributed.device_mesh import init_device_mesh
rank = dist.get_rank()
for mesh in (None, init_device_mesh("cpu", (4,))):  # the default group, as the user made it
    comm = connect(mesh, device=CPU)
    assert (comm.rank, comm.world, comm.local_rank, comm.local_world) == (rank, 4, rank, 4)
    assert comm.total(1.0) == 4.0
    comm.close()
    assert dist.is_initialized()

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
told(lambda: connect(mesh, device=CPU))
told(lambda: connect("mesh", device=CPU))
told(lambda: connect(mesh["shard"], device=CPU))
told(lambda: connect(init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))["b"], device=CPU))
both = [connect(device=CPU) for _ in range(2)]  # two at once
for comm in both:
    assert comm.exchange("one", b"%d" % rank) == [b"0", b"1", b"2", b"3"]
    run = torch.tensor([rank] * 4)
    comm.gather(run)
    assert run.tolist() == [0, 1, 2, 3]
for comm in both:
    comm.close()
dist.destroy_process_group()
"""
    for result in run_ranks(4, START + script, str(free_port())):
        two, none, row, one = errors(result)
        assert {kind for kind, *_ in errors(result)} == {"ConfigError"}
        assert "2 dimensions" in two[1]
        assert "str" in none[1]
        for part in row[1], one[1]:
            assert "the mesh does not have all ranks of the job" in part


def test_an_environment_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK and MASTER_ADDR and MASTER_PORT are not") as caught:
        connect(device=cpu)
    assert "torchrun" in str(caught.value)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        connect(device=cpu)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="timeout"):
        connect(device=cpu, timeout=0)
    assert isinstance(connect(device=cpu), Alone)


def test_ranks_that_differ_are_told_who_does_what() -> None:
    script = """
comm = connect(device=CPU)
told(comm.exchange, "gather of unit 'h.3'" if comm.rank != 1 else "step")
told(comm.exchange, "a" * 300 + str(comm.rank % 2))  # beyond what is sent of it
told(comm.exchange, "again together")
comm.close()
"""
    for result in run_ranks(3, START + script):
        first, second, third = errors(result)
        assert first[0] == second[0] == "DivergenceError"
        assert "ranks 0, 2: gather of unit 'h.3'; rank 1: step" in first[1]
        assert third[0] == ""


#: What a rank does, its exit code, and what the others are told of it. One that is stopped is slow, for all
#: that anyone can tell: the others end, and nobody waits for gloo's threads.
HOW: dict[str, tuple[str, int | None, str]] = {
    "raised": ("raise ValueError('no such\\nthing')", 1, "rank {} failed: ValueError: no such\nthing"),
    "posted": (
        "comm.post(ValueError('no such\\nthing'))\ncomm.post(TypeError('a second one'))\ncomm.close()",
        *(0, "rank {} failed: ValueError: no such\nthing"),
    ),
    "interrupted": (
        "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1)",
        *(None, "rank {} failed: KeyboardInterrupt"),
    ),
    "exited": ("sys.exit(3)", 3, "rank {} has closed the engine or ended"),
    "ended": ("pass", 0, "rank {} has closed the engine or ended"),
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        *(-9, "rank {} is gone: its process ended without a word"),
    ),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", -9, "gather: rank {} has not come within 2 s"),
}


@pytest.mark.first
@pytest.mark.parametrize(
    ("how", "who", "what"),
    [
        ("killed", 0, "exchange"),
        ("killed", 2, "gather"),
        ("killed", 0, "reduce"),
        ("raised", 0, "gather"),
        ("posted", 1, "exchange"),
        ("interrupted", 1, "gather"),
        ("exited", 0, "exchange"),
        ("ended", 1, "gather"),
        ("stopped", 0, "gather"),
        ("stopped", 1, "gather"),
    ],
)
def test_a_rank_that_fails_or_ends(how: str, who: int, what: str) -> None:
    script = """
who, what, does = int(sys.argv[1]), sys.argv[2], sys.argv[3]
comm = connect(device=CPU, timeout=2 if "STOP" in does else 300)
DO[what](comm)
if comm.rank == who:
    time.sleep(0.1)
    exec(does)
else:
    told(DO[what], comm)
    told(comm.exchange, "once more")
    comm.close()
"""
    does, wanted, words = HOW[how]
    results = run_ranks(3, START + script, str(who), what, does, seconds=20)
    code, _, err = results.pop(who)
    assert wanted is None or code == wanted, err
    assert how != "raised" or "ValueError: no such" in err
    for result in results:
        (kind, text), (again, _) = errors(result)
        assert kind == again == "RankError"
        assert words.format(who) in text


@pytest.mark.integration
def test_a_killed_rank_that_has_children() -> None:
    """A fork of a rank is no rank: it may end as it likes, and a rank is gone though its fork lives on."""
    script = """
comm = connect(device=CPU)
DO["gather"](comm)
if os.fork() == 0:
    if comm.rank == 1:
        time.sleep(5)
        os._exit(0)
    told(DO["exchange"], comm)
    comm.close()
    raise ValueError("nobody hears of it")
os.wait() if comm.rank != 1 else time.sleep(0.2)
DO["exchange"](comm)
if comm.rank == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
told(DO["exchange"], comm)
assert time.monotonic() - begin < 4
comm.close()
"""
    results = run_ranks(3, START + script)
    assert results.pop(1)[0] == -9
    for result in results:
        (fork, _), (kind, text) = errors(result)
        assert fork == "ClosedError"
        assert kind == "RankError"
        assert "rank 1 is gone: its process ended without a word" in text


@pytest.mark.integration
def test_a_rank_that_does_not_come() -> None:
    """Rank 1 makes no engine at first; then it does something else than the others, and they see what."""
    script = """
comm = connect(device=CPU, timeout=1)
told(DO["gather" if comm.rank != 1 else "exchange"], comm)
comm.close()
"""
    for result in run_ranks(3, START + script):
        kind, text = the_error(result)
        assert kind == "RankError"
        assert "not come within 1 s" in text
    script = """
dist.init_process_group("gloo")
if dist.get_rank() != 0:
    told(lambda: connect(device=CPU, timeout=0.5))
else:
    time.sleep(1.5)
"""
    results = run_ranks(3, START + script)
    results.pop(0)
    for result in results:
        assert "rank 0 has not come within 0.5 s" in the_error(result)[1]


@pytest.mark.integration
@pytest.mark.first
@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupt_is_heard_while_ranks_are_awaited(who: int) -> None:
    script = """
import threading
if os.environ["RANK"] == sys.argv[1]:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    try:
        connect(device=CPU)
    finally:
        print(time.monotonic() - begun)
"""
    code, out, err = run_ranks(2, START + script, str(who), seconds=20)[who]
    assert code == -signal.SIGINT, err
    assert float(out) < 5
    assert "KeyboardInterrupt" in err


@pytest.mark.integration
def test_ranks_that_torchrun_starts_again(tmp_path: Path) -> None:
    """They do not meet what the store has of those before."""
    script = """
comm = connect(device=CPU, timeout=60)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
comm.exchange(f"attempt {attempt}")
if attempt == comm.rank:
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write(f"well {attempt} {comm.total(1.0)}\\n")
comm.close()
"""
    (tmp_path / "ranks.py").write_text(START + script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "ranks.py")],
        **{"capture_output": True, "text": True, "timeout": 100, "check": False},
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("well 2 2.0") == 2


# Where a thread asks for the interpreter before its end begins, and gets it not until then, CPython ends that
# thread. So the last that Python does here is to keep the interpreter for itself, in C, for half a second.
_LEFT_BEHIND = """
import atexit, ctypes, weakref
from infinity.core.at_exit import at_end
comm, there = connect(device=CPU, timeout=20), sys.argv[2]
if comm.rank == 1:
    time.sleep(0.5)  # rank 0 waits
    comm.post(ValueError("ends"))
    while not os.path.exists(there):
        time.sleep(0.01)
    os._exit(0)  # what gloo's threads still have of rank 0 fails now
try:
    DO[sys.argv[1]](comm)
except RankError as error:
    print("RankError", flush=True)
class Last: ...
last, keep = Last(), ctypes.PyDLL(None).usleep
keep.argtypes = [ctypes.c_uint, ctypes.py_object]
sys.modules["last"] = weakref.ref(last, functools.partial(keep, 500_000))
atexit.register(id, last)
del last
at_end(lambda: os.close(os.open(there, os.O_CREAT)), last=True)
sys.exit(3)
"""


@pytest.mark.first
@pytest.mark.parametrize("what", ["exchange", "gather"])
def test_a_collective_that_is_left_behind_does_not_end_the_interpreter(what: str, tmp_path: Path) -> None:
    first, _ = run_ranks(2, START + _LEFT_BEHIND, what, str(tmp_path / "at the end"))
    assert first == (3, "RankError\n", "")


EARLY = """
import infinity
from torch import nn
who, how = int(sys.argv[1]), sys.argv[2]
if "group" in how:
    dist.init_process_group("gloo")
model = nn.Linear(8, 8)
adam = torch.optim.AdamW(model.parameters())
if int(os.environ["RANK"]) == who:
    time.sleep(0.5 if "late" in how else 0.0)
    if "exits" in how:
        sys.exit(0)
    raise ValueError("mine")
told(infinity.wrap, model, adam, infinity.Config(device="cpu", dtype="fp32"))
"""


@pytest.mark.first
@pytest.mark.parametrize(
    ("who", "how"),
    [
        (1, "late"),
        (0, "at once"),
        (0, "late, in a group"),
        (1, "exits late, from a group"),
        (0, "exits late, from a group"),
    ],
)
def test_a_rank_that_ends_before_wrap(who: int, how: str) -> None:
    """The others, which wait for it to come, end with its error, long before the deadline."""
    results = run_ranks(3, START + EARLY, str(who), how, seconds=60)
    code, _, err = results.pop(who)
    wanted = [f"rank {who} failed before its `wrap`: ValueError: mine"]
    if "exits" in how:
        wanted = [f"rank {who} ended before its `wrap`, without an exception"]
        wanted += ["rank 0 is gone: it ended before all ranks had come to `wrap`"] * (
            who == 0
        )  # with its store
    assert code == (0 if "exits" in how else 1)
    assert "exits" in how or "ValueError: mine" in err
    for result in results:
        kind, text = the_error(result)
        assert kind == "RankError"
        assert any(words in text for words in wanted), text


NAP = """
comm = connect(device=CPU, timeout=1, notice=0.4)
def nap():
    time.sleep(5)
if comm.rank == 1:
    nap()
comm.exchange("a step")
comm.close()
"""


@pytest.mark.integration
def test_a_rank_that_is_alive_and_outside_is_waited_for() -> None:
    """Beyond the deadline; and both are told where the two are, at growing intervals."""
    results = run_ranks(3, START + NAP)
    all_well(results)
    line = (START + NAP).splitlines().index("    time.sleep(5)") + 1
    (_, _, waits), (_, _, sleeps), _ = results
    assert f"Rank 1: it is in `nap` at <rank>:{line}" in waits
    assert "in: a step (`<module>` at <rank>:" in sleeps
    assert f"This rank, 1, is in `nap` at <rank>:{line}" in sleeps
    assert 2 <= sleeps.count("has waited for") <= 6


#: Rank 1 waits for its worker, which waits for that of rank 0; and the program of rank 0 waits for rank 1.
BESIDE = """
import threading
program, beside = connect(device=CPU, timeout=1), connect(device=CPU, timeout=1, apart=True)

def work():
    if beside.rank == 0:
        time.sleep(2)
    beside.exchange("an update")

worker = threading.Thread(target=work)
worker.start()
if program.rank == 1:
    worker.join()
program.exchange("a forward")
worker.join()
for each in (program, beside):
    each.close()
"""


@pytest.mark.integration
def test_a_rank_in_a_collective_of_another_thread_is_outside() -> None:
    """Nobody is late: a worker takes longer than the deadline."""
    all_well(run_ranks(2, START + BESIDE))
