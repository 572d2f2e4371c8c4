"""What runs while something fails: three steps of a store, or of a training run.

Each returns a digest of all bits that it ends with, and compares every byte that it reads on the
way with a plain dict; a difference raises `SilentDamage`, which no run may ever end with.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.core.errors import InfinityError, StorageError
from infinity.core.sizes import Tier
from infinity.hardware.aio import RingSettings
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.store import Part, Store, Version

from . import inner, models

PAGE = 4096
STEPS = 3
CHUNKS = 3
_CHUNK = {
    "copy": Part((2 * PAGE,), (Tier.NVME,)),
    "state": Part((PAGE, 2 * PAGE, PAGE), (Tier.NVME,)),
    "gradient": Part((3 * PAGE,), (Tier.NVME,)),
}
#: Where each part of a chunk stands in a lease.
_AT = {"state": 0, "copy": 4 * PAGE, "gradient": 6 * PAGE}
_ROOM = 9 * PAGE


class SilentDamage(Exception):
    """Wrong bytes came back as if they were right."""


class Ended(Exception):
    """A run ended with `error` after `seconds`; closing took `close_seconds`."""

    def __init__(
        self, error: BaseException, seconds: float, close_error: BaseException | None, close_seconds: float
    ) -> None:
        super().__init__(error)
        self.error, self.seconds = error, seconds
        self.close_error, self.close_seconds = close_error, close_seconds


def guarded(run: Callable[[], str], close: Callable[[], None], begun: float) -> str:
    """Run, then close whatever came of it; raise `Ended` if either failed."""
    error: BaseException | None = None
    digest = ""
    try:
        digest = run()
    except (Exception, KeyboardInterrupt) as found:
        error = found
    seconds = time.monotonic() - begun
    close_error: BaseException | None = None
    closing = time.monotonic()
    try:
        close()
    except (Exception, KeyboardInterrupt) as found:
        close_error = found
    if error is not None or close_error is not None:
        took = time.monotonic() - closing
        raise Ended(error or close_error, seconds, close_error, took)  # type: ignore[arg-type]
    return digest


def store_run(
    directories: list[str],
    *,
    backend: str,
    deadline: float,
    slots: int = 1,
    delay_seed: int | None = None,
    report: dict[str, Any] | None = None,
) -> str:
    """Read, change and write every part of every chunk, `STEPS` times, a chunk read ahead; with two `slots`
    what is written is the back, which then comes to the front."""
    begun = time.monotonic()
    chunk = {name: spec._replace(tiers=spec.tiers * slots) for name, spec in _CHUNK.items()}
    pool = PinnedPool({"update": (_ROOM, 3)})
    try:
        store = Store(
            [chunk] * CHUNKS,
            directories=directories,
            pool=pool,
            rings=RingSettings(backend, 2 * PAGE, 4, deadline, delay_seed),
        )
    except InfinityError as error:
        pool.close()
        raise Ended(error, time.monotonic() - begun, None, 0.0) from error
    model = {(c, name): bytes(spec.nbytes) for c in range(CHUNKS) for name, spec in _CHUNK.items()}

    def close() -> None:
        try:
            store.close()
        finally:
            pool.close()

    def run() -> str:
        for step in range(STEPS):
            _step(store, pool, model, step)
        store.wait_written()
        if report is not None:
            report["submits"] = sum(s.submits for s in store.ring_stats())
        digest = hashlib.sha256()
        for chunk in range(CHUNKS):
            with _read(store, pool, chunk)() as lease:
                for name in _CHUNK:
                    digest.update(_compare(lease, model, chunk, name))
        return digest.hexdigest()

    return guarded(run, close, begun)


def _read(store: Store, pool: PinnedPool, chunk: int) -> Callable[[], Lease]:
    """Start to read a chunk; return what waits for it."""
    lease = pool.lease("update", _ROOM, timeout=30.0)
    try:
        transfers = [store.read(chunk, name, lease, _AT[name]) for name in _CHUNK]
    except BaseException:
        lease.release()
        raise

    def wait() -> Lease:
        try:
            for transfer in transfers:
                transfer.wait()
        except BaseException:
            lease.release()
            raise
        return lease

    return wait


def _step(store: Store, pool: PinnedPool, model: dict[tuple[int, str], bytes], step: int) -> None:
    ahead = _read(store, pool, 0)
    for chunk in range(CHUNKS):
        wait = ahead
        if chunk + 1 < CHUNKS:
            ahead = _read(store, pool, chunk + 1)
        with wait() as lease:
            for number, name in enumerate(_CHUNK):
                _compare(lease, model, chunk, name)
                view = lease.tensor(torch.uint8, _AT[name], _CHUNK[name].nbytes).numpy()
                view *= 5
                view += (step * 31 + chunk * 7 + number * 3 + 1) % 256
                view[:: 97 + chunk] ^= 0x5A
                model[chunk, name] = view.tobytes()
                if store.versions.has_two(name):
                    store.write(chunk, name, lease, _AT[name], version=Version.BACK)
                    store.versions.flip(chunk, name)
                else:
                    store.write(chunk, name, lease, _AT[name])


def _compare(lease: Lease, model: dict[tuple[int, str], bytes], chunk: int, name: str) -> bytes:
    wanted = model[chunk, name]
    found = bytes(lease.tensor(torch.uint8, _AT[name], len(wanted)).numpy())
    if found != wanted:
        raise SilentDamage(f"part {name!r} of chunk {chunk} is not what was written, and nobody said so")
    return found


class Training:
    """A small GPT on `directory`, wrapped, and its losses. `make`: its optimizer."""

    def __init__(
        self, directory: Path | list[Path], *, make: Any = torch.optim.AdamW, **settings: Any
    ) -> None:
        self.case = models.case("gpt", seed=3, batches=4, batch_size=2, width=32, layers=2, heads=2)
        self.model: Any = self.case.model
        self.before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.adam: Any = make(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        config = {
            "device": "cpu",
            "dtype": "fp32",
            "device_memory": "4MiB",
            "host_memory": "32MiB",
            "chunk_elements": 65536,
            "block_bytes": "16KiB",
            "threads": 1,
            **dict.fromkeys(("parameters", "optimizer_state", "gradients"), "nvme"),
            **settings,
        }
        self.config = inner.config(nvme=directory, **config)

    def wrap(self) -> Training:
        self.model, self.adam = infinity.wrap(self.model, self.adam, self.config)
        return self

    def steps(self, count: int) -> list[float]:
        for _ in range(count):
            loss = self.case.loss(self.model, self.case.batches[len(self.losses) % 4])
            loss.backward()
            self.adam.step()
            self.adam.zero_grad()
            self.losses.append(loss.item())
        return self.losses

    def untouched(self) -> None:
        """Nothing of the model was taken, and it still trains by itself."""
        for name, param in self.model.named_parameters():
            assert torch.equal(param, self.before[name])
        self.steps(1)

    def __enter__(self) -> Training:
        return self.wrap()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(StorageError):  # what a test expected has been raised before
            infinity.close(self.adam)


def training_run(directories: list[str], *, backend: str, deadline: float, rounded: bool = False) -> str:
    """Train a small GPT for `STEPS` steps with everything on NVMe: by AdamW, or, `rounded`, by Lion with its
    moment in bf16."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    run = Training(
        [Path(d) for d in directories],
        make=infinity.optim.Lion if rounded else torch.optim.AdamW,
        max_grad_norm=1.0,
        optimizer_state_dtype="bf16" if rounded else "fp32",
        aio_backend=backend,
        io_deadline=deadline,
    )
    try:
        run.wrap()
    except InfinityError as error:
        raise Ended(error, time.monotonic() - begun, None, 0.0) from error

    def digest() -> str:
        found = hashlib.sha256(repr(run.steps(STEPS)).encode())
        with infinity.gathered(run.model):
            for name, param in run.model.named_parameters():
                found.update(name.encode() + param.detach().cpu().numpy().tobytes())
        return found.hexdigest()

    return guarded(digest, lambda: infinity.close(run.adam), begun)


RUNS: dict[str, Callable[..., str]] = {
    "store": store_run,
    "training": training_run,
    "training-bf16": functools.partial(training_run, rounded=True),
}
