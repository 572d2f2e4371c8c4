"""Settings of all tests."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Before torch is loaded, for child processes and workers of xdist too: a thread of OpenMP that spins while it
# waits takes the core from the other worker's, and a step of milliseconds takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from hypothesis import HealthCheck, settings

from . import lock_order

# A shared machine has slow moments; a run in CI tries the same examples every time.
settings.register_profile("infinity", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("infinity"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "infinity")

# Child processes ask no one for a model or a data set.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Locks hold their users to the order ([Note: the order of locks]). Child processes are killed and
# interrupted, and have plain ones.
lock_order.check()

# A background job of a shell ignores SIGINT, what `nohup` starts SIGHUP; child processes inherit that, and
# tests send them these.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Fixtures of several files. Locks that are made as these import the engine are among those.
from infinity.api.engine import _ENGINES  # noqa: E402
from infinity.core.errors import InfinityError  # noqa: E402
from infinity.hardware import cpu_adam  # noqa: E402

from . import inner, ranks  # noqa: E402
from .command_line import nvme, own_environment, text  # noqa: E402, F401
from .lagging.lane import devices  # noqa: E402
from .quick import leave_the_rest  # noqa: E402
from .small_net import config, wrapped  # noqa: E402, F401

# Workers of xdist share the cores: if each of them, and each of their child processes, took all, torch's
# threads would spin while they wait for each other.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    torch.set_num_threads(max(1, torch.get_num_threads() // int(workers)))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "lagging"),
        default="cpu",
        help='what device="cpu" means: see lagging/lane.py',
    )


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--device lagging` engines have a CUDA device that is late; what it finds fails the test."""
    ranks.DEVICE = request.config.getoption("--device")
    with devices(ranks.DEVICE):
        yield


@pytest.fixture(autouse=True)
def _close_what_is_left(_device: None) -> Iterator[None]:
    """Close the engines that a test leaves open. While one is open, each `wrap` runs the collector."""
    before = {engine.number for engine in _ENGINES}
    yield
    for engine in [*_ENGINES]:
        if engine.number not in before:
            with contextlib.suppress(InfinityError):  # a test has broken its drive, say
                engine.close()


@pytest.fixture(autouse=True)
def _constants_as_before() -> Iterator[None]:
    yield
    inner.reset()


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    """A test starts with torch's defaults, and a test that changes them does not change the next."""
    dtype, threads, state = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it costs seconds
        torch.use_deterministic_algorithms(deterministic)
    torch.set_rng_state(state)


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_comes() -> None:
    """What is there before a file's tests stays. `wrap` runs the collector while an engine is open; each run
    would take most of a second to look at torch, at transformers and at all tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def kernel_as_before() -> Iterator[None]:
    """A test may choose the instruction set and the threads of the kernel."""
    isa, threads = cpu_adam.isa(), cpu_adam.threads()
    yield
    cpu_adam.set_isa(isa)
    cpu_adam.set_threads(threads)


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


_INSIDE = "INFINITY_INSIDE_OF_A_TEST"


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time of the test begins to count
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is marked `serial` runs while no other worker runs one. Tests that a test starts have its
    place: a turn of their own would come after one that waits for that test."""
    if os.environ.get(_INSIDE):
        return (yield)
    serial = item.get_closest_marker("serial") is not None
    with open(__file__) as machine, Path(__file__).with_name("__init__.py").open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # those that begin now come after one that waits for the machine
        fcntl.flock(machine, fcntl.LOCK_EX if serial else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        os.environ[_INSIDE] = "yes"
        try:
            return (yield)
        finally:
            del os.environ[_INSIDE]
            fcntl.flock(machine, fcntl.LOCK_UN)  # closing it does not, if a child has it too


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Serial tests come last: then no worker waits for them that has others to run.

    A test for a GPU fails in CI where there is none; `make test` does not select it. Engines of other
    processes have no lagging device. Nor has a process that ran a backward before it knew that device.
    """
    leave_the_rest(items)
    on_cpu = session.config.getoption("--device") == "cpu"
    for mark in ("lagging",) if on_cpu else ("processes", "on_cpu"):
        session.config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker(mark)])
        items[:] = [i for i in items if not i.get_closest_marker(mark)]
    items.sort(key=lambda item: item.get_closest_marker("serial") is not None)
    if torch.cuda.is_available() or os.environ.get("CI"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
