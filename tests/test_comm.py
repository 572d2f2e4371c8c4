"""What ranks tell each other; and that all end with the first error when one fails, in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from infinity.core.errors import ConfigError
from infinity.hardware.comm import Alone, connect

from .quick import quick
from .ranks import all_well, run_ranks

HEAD = """
import os, signal, sys, time
import torch
from infinity.hardware.comm import connect
torch.set_num_threads(1)
comm = connect(device=torch.device("cpu"), timeout={timeout})
rank, world = comm.rank, comm.world
"""

COLLECTIVES = """
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for numel in (1, 64, 100_000):
        wanted = torch.randn(world, world, numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        run = torch.full((world, numel), float("nan"), dtype=dtype)
        run[rank] = wanted[0, rank]
        comm.gather(run.view(-1))
        assert torch.equal(run, wanted[0])
        mean = torch.zeros(numel)
        for other in range(world):
            mean = mean + wanted[other, rank].float()
        assert torch.equal(comm.reduce(wanted[rank].reshape(-1)), mean / world)
        for source in range(world):
            flat = wanted[rank].reshape(-1).clone()
            comm.broadcast(flat, source)
            assert torch.equal(flat, wanted[source].reshape(-1))
for length in (0, 1, 499, 500, 501, 100_000):
    value = bytes([rank + 1]) * (length + rank)
    assert comm.exchange(f"{length}", value) == [bytes([r + 1]) * (length + r) for r in range(world)]
comm.close()
comm.close()
print("well")
"""


def ranks(world: int, script: str, timeout: float = 60.0, seconds: int = 60) -> list[tuple[int, str, str]]:
    return run_ranks(world, HEAD.format(timeout=timeout) + script, seconds=seconds)


@pytest.mark.parametrize("world", quick([2, 3, 4], [2]))
def test_collectives(world: int) -> None:
    assert all_well(ranks(world, COLLECTIVES)) == ["well\n"] * world


def test_alone() -> None:
    comm = connect(device=torch.device("cpu"))
    assert isinstance(comm, Alone)
    assert (comm.rank, comm.world, comm.local_rank, comm.local_world) == (0, 1, 0, 1)
    assert comm.exchange("anything", b"mine") == [b"mine"]
    comm.close()


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    class Mesh:
        ndim, shape = 2, (2, 2)

    with pytest.raises(ConfigError, match="several dimensions"):
        connect(Mesh(), device=torch.device("cpu"))


def test_the_group_that_is_there_and_a_mesh_of_it_are_taken() -> None:
    script = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
comm = connect(device=torch.device("cpu"))
assert comm.exchange("first", bytes([comm.rank])) == [b"\\0", b"\\1"]
other = connect(init_device_mesh("cpu", (2,)), device=torch.device("cpu"))
assert other.exchange("second") == [b"", b""]
comm.close()
other.close()
dist.barrier()  # it is not ours to end
dist.destroy_process_group()
"""
    all_well(run_ranks(2, HEAD.partition("comm = ")[0] + script))


def test_ranks_that_do_not_do_the_same_are_told_both_sides() -> None:
    script = 'comm.exchange("one thing" if rank < 2 else "another")'
    for code, _, err in ranks(3, script):
        assert code == 1
        assert "DivergenceError" in err
        assert "rank 0: one thing; rank 1: one thing; rank 2: another" in err


#: what one rank does while the others wait: the words of what they raise
ENDS: dict[str, tuple[str, str]] = {
    "raises": ("raise ValueError('a mistake of mine')", "ValueError: a mistake of mine"),
    "interrupted": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", "KeyboardInterrupt"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "is gone|connection to another rank is closed"),
    "exits": ("os._exit(3)", "is gone|connection to another rank is closed"),
    "posts": ("comm.post(OSError('no space')); time.sleep(1)", "OSError: no space"),
}
#: what the others wait in
WAITS = {
    "exchange": 'comm.exchange("a")',
    "gather": "comm.gather(torch.zeros(3 << 20))",
    "reduce": "comm.reduce(torch.zeros(3 << 20))",
    "broadcast": "comm.broadcast(torch.zeros(3 << 20), 1)",
}


def others_end(
    script: Callable[[int], str], which: int, words: str, within: float, timeout: float = 60.0
) -> None:
    """All but rank `which` of three end with an error that has one of `words`, in time."""
    text = f"""
began = time.monotonic()
try:
    if rank == {which}:
        time.sleep(0.3)
        {script(0)}
    else:
        while True:  # one may be over without the rank that ends
            {script(1)}
except BaseException as error:
    print(f"{{time.monotonic() - began:.1f}} {{type(error).__name__}}", flush=True)
    raise
"""
    began = time.monotonic()
    results = ranks(3, text, timeout=timeout, seconds=40)
    for rank, (code, out, err) in enumerate(results):
        if rank == which:
            continue
        assert code == 1, (rank, code, err)
        seconds, name = out.split()
        assert (name, float(seconds) < within) == ("RankError", True), (out, err)
        assert any(word in err for word in words.split("|")), err
    assert time.monotonic() - began < within + 12


@pytest.mark.parametrize("which", quick([0, 1, 2], [1], [0]))
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.covering
def test_when_one_rank_ends_all_do(end: str, wait: str, which: int) -> None:
    does, words = ENDS[end]
    others_end(lambda waits: WAITS[wait] if waits else does, which, words, 10)


@pytest.mark.parametrize("which", quick([0, 2], [2]))
def test_a_rank_that_is_stopped_is_too_late(which: int) -> None:
    does = "os.kill(os.getpid(), signal.SIGSTOP)"
    others_end(
        lambda waits: WAITS["exchange"] if waits else does, which, "within rank_timeout", 10, timeout=2
    )


def test_what_is_long_is_compared_to_its_end() -> None:
    script = 'comm.exchange("x" * 1000 + str(rank))'
    assert all("DivergenceError" in err for _, _, err in ranks(2, script))


def test_the_mean_is_that_of_doubles_to_a_rounding() -> None:
    """What is added up in fp32, in the order of the ranks, is what anybody would expect."""
    script = """
values = torch.randn(world, world * 64, generator=torch.Generator().manual_seed(1))
mine = comm.reduce(values[rank])
exact = values.double().mean(0)[rank * 64 : (rank + 1) * 64]
print(float((mine - exact).abs().max()))
comm.close()
"""
    for said in all_well(ranks(3, script)):
        assert math.isclose(float(said), 0, abs_tol=1e-6)
