"""Cores and NUMA nodes: limits from faked /proc and /sys, and a real mapping that prefers a node."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch

import infinity
from infinity.api.this_machine import threads_of
from infinity.hardware import cores, cpu_adam
from infinity.hardware.cores import Cores, choose_node, cpu_quota, prefer_node
from infinity.hardware.probe import NumaNode, gpu_numa_node, numa_node_of, numa_nodes
from infinity.storage.memory import HostMapping, HostMemory
from infinity.storage.pinned import PinnedPool

from .small_store import Pins


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---- cores ----


def test_cores_of_a_process_and_what_a_config_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [Cores(16, None, 1), Cores(16, None, 5), Cores(16, 6.0, 2), Cores(2, None, 8)]
    alone = [Cores(16, 2.5, 1), Cores(16, 0.5, 1), Cores(4, 8.0, 1)]
    assert [each.mine for each in shared + alone] == [16, 3, 3, 1, 2, 1, 4]
    monkeypatch.setattr("infinity.api.this_machine.usable_cores", lambda: Cores(8, None, 1))
    folders = [tmp_path / "a", tmp_path / "b"]
    two = infinity.Config(nvme=folders, optimizer_state="nvme")
    assert threads_of(two, staged=True) == 6
    assert threads_of(two, staged=False) == 8
    assert threads_of(two.replace(threads=3), staged=True) == 3
    assert threads_of(infinity.Config(nvme=folders), staged=True) == 7  # nothing is on NVMe: no ring


def test_the_tightest_quota_above_counts_in_version_2(tmp_path: Path) -> None:
    proc = write(tmp_path / "cgroup", "0::/a/b\n")
    write(tmp_path / "fs/a/b/cpu.max", "max 100000\n")
    write(tmp_path / "fs/a/cpu.max", "250000 100000\n")
    assert cpu_quota(proc, tmp_path / "fs") == 2.5
    write(tmp_path / "fs/a/b/cpu.max", "150000 100000\n")
    assert cpu_quota(proc, tmp_path / "fs") == 1.5
    for text in ("max 100000\n", "rubbish\n"):
        for folder in ("a", "a/b"):
            write(tmp_path / "fs" / folder / "cpu.max", text)
        assert cpu_quota(proc, tmp_path / "fs") is None
    assert cpu_quota(tmp_path / "missing", tmp_path) is None


def test_a_quota_of_version_1(tmp_path: Path) -> None:
    proc = write(tmp_path / "cgroup", "5:cpu,cpuacct:/x\n4:cpuset:/y\n1:name=systemd:/\n")
    folder = tmp_path / "fs/cpu,cpuacct/x"
    write(folder / "cpu.cfs_quota_us", "-1\n")
    write(folder / "cpu.cfs_period_us", "100000\n")
    assert cpu_quota(proc, tmp_path / "fs") is None
    write(folder / "cpu.cfs_quota_us", "300000\n")
    assert cpu_quota(proc, tmp_path / "fs") == 3.0
    # In a container the path is the host's and the folder is not there: the root of the mount counts.
    write(tmp_path / "fs/cpu,cpuacct/cpu.cfs_quota_us", "100000\n")
    write(tmp_path / "fs/cpu,cpuacct/cpu.cfs_period_us", "50000\n")
    write(proc, "5:cpu,cpuacct:/docker/0123\n")
    assert cpu_quota(proc, tmp_path / "fs") == 2.0


@pytest.mark.usefixtures("kernel_as_before")
def test_the_pool_follows_the_limits_and_torch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(cores, "cpu_quota", lambda: 6.5)
    monkeypatch.setattr(cores, "allowed_cpus", lambda: frozenset(range(8)))
    for text, threads in (("2", 3), ("", 6), ("many", 6), ("0", 6)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        cpu_adam.set_threads(None)
        assert cpu_adam.threads() == threads
    assert torch.get_num_threads() == before


# ---- NUMA ----

NEAR = NumaNode(0, frozenset(range(8)), 1 << 34)
FAR = NumaNode(1, frozenset(range(8, 16)), 1 << 34)
BARE = NumaNode(2, frozenset(range(16, 24)), 0)
ALL = frozenset(range(24))


def test_the_node_of_the_device_then_of_the_drives_then_of_the_cores() -> None:
    nodes = (NEAR, FAR, BARE)
    assert choose_node(nodes, ALL, 1, [0]) == 1
    assert choose_node(nodes, ALL, None, [1, 1]) == 1
    assert choose_node(nodes, ALL, None, [0, 1]) is None
    assert choose_node(nodes, FAR.cpus, None, [0, 1]) == 1
    assert choose_node(nodes, FAR.cpus, None, [None]) == 1
    assert choose_node(nodes, ALL, None, []) is None
    assert choose_node(nodes, ALL, 2, [0]) == 0  # a node without memory gives none
    assert choose_node(nodes, BARE.cpus, None, []) is None
    assert choose_node((NEAR,), NEAR.cpus, 0, [0]) is None
    assert choose_node((NEAR, BARE), ALL, 0, [0]) is None
    assert choose_node((), ALL, 0, [0]) is None


def test_nodes_and_devices_of_a_faked_machine(tmp_path: Path) -> None:
    system = tmp_path / "node"
    for number, cpus, kilobytes in ((0, "0-3,8", 1000), (1, "4-7", 2000), (10, "9", 0)):
        write(system / f"node{number}" / "cpulist", cpus)
        write(system / f"node{number}" / "meminfo", f"Node {number} MemTotal:  {kilobytes} kB\n")
    nodes = numa_nodes(system)
    assert [n.number for n in nodes] == [0, 1, 10]
    assert nodes[0] == NumaNode(0, frozenset({0, 1, 2, 3, 8}), 1000 * 1024)
    write(tmp_path / "pci/0000:17:00.0/numa_node", "1\n")
    write(tmp_path / "pci/0000:18:00.0/numa_node", "-1\n")
    assert gpu_numa_node("0000:17:00.0", tmp_path / "pci") == 1
    assert gpu_numa_node("0000:18:00.0", tmp_path / "pci") is None
    assert gpu_numa_node("0000:19:00.0", tmp_path / "pci") is None
    assert gpu_numa_node(None, tmp_path / "pci") is None
    drive = tmp_path / "devices/pci0000/0000:19:00.0/nvme/nvme0/nvme0n1"
    drive.mkdir(parents=True)
    write(tmp_path / "devices/pci0000/0000:19:00.0/numa_node", "1\n")
    assert numa_node_of(drive) == 1
    assert choose_node(nodes, {0, 4}, None, [numa_node_of(drive)]) == 1


def policy_at(address: int) -> str:
    """What /proc/self/numa_maps says of the mapping at `address` (numa(7))."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if int(line.split()[0], 16) == address:
            return line.split()[1]
    raise AssertionError(f"no mapping at {address:x}")


@pytest.fixture
def _with_mbind() -> None:
    mapping = HostMapping(1 << 21)
    if not prefer_node(mapping.address, mapping.nbytes, 0):
        pytest.skip("mbind is forbidden here")


@pytest.mark.usefixtures("_with_mbind")
def test_a_mapping_prefers_its_node() -> None:
    first = numa_nodes()[0].number
    for twice in (False, True):
        mapping = HostMapping(1 << 22, populate=True, twice=twice, node=first)
        assert re.match(rf"prefer.*:{first}$", policy_at(mapping.address))
        assert int(mapping.tensor(0, 1 << 22).sum()) == 0
        mapping.tensor(0, 1 << 22).fill_(7)
    pool = PinnedPool({"update": (1 << 20, 2)}, node=first)
    assert policy_at(pool.buffers()[0][0]).startswith("prefer")
    pool.close()
    pins = Pins()
    memory = HostMemory(1 << 21, pins=pins, node=first)
    assert policy_at(pins.calls[0][1]).startswith("prefer")
    assert memory.take(4096).numel() == 4096
    unpinned = HostMemory(1 << 21, node=first)
    assert policy_at(unpinned.take(4096).data_ptr()) == "default"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_what_the_kernel_forbids_is_left_out(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden:
        @staticmethod
        def syscall(*_: object) -> int:
            cores.ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(cores, "_libc", Forbidden)
    assert HostMapping(1 << 21, node=0).nbytes == 1 << 21
    assert not prefer_node(4096, 4096, 0)
    monkeypatch.setattr(cores.platform, "machine", lambda: "riscv64")
    assert not prefer_node(4096, 4096, 0)


def test_adam_has_its_threads_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    cpu_adam.set_threads(7)
    config = infinity.Config(device="cpu", device_memory="8MiB", host_memory="64MiB", chunk_elements=65536)
    wrapped, _ = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    try:
        assert cpu_adam.threads() == cores.usable_cores().mine
    finally:
        infinity.close(wrapped)
