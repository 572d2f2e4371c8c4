"""The order of locks is kept, and a thread that breaks it is told, in tests."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path

import pytest

import infinity
from infinity.api.engine import engine_of
from infinity.core import locks
from infinity.core.waiting import Bell, Latch

from .lock_order import LockOrderError
from .models import case
from .offloaded import config_for, wrap_adamw

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("first", range(len(locks.ORDER)))
def test_a_pair_that_is_inverted(first: int) -> None:
    made = [locks.lock(name) for name in locks.ORDER]
    with made[first]:
        for later in made[first + 1 :]:
            with later:
                pass
        for earlier in made[: first + 1]:
            with pytest.raises(LockOrderError, match="taken while holding"), earlier:
                pass
    with made[0]:  # nothing is left of the attempts
        pass


def test_two_locks_with_one_place() -> None:
    one, other = (locks.lock("pool", reentrant=True) for _ in range(2))
    with one, one:
        with pytest.raises(LockOrderError), other:
            pass


@pytest.mark.parametrize("wait", [Latch().wait, lambda: Bell().wait(lambda: True)])
def test_a_wait_under_a_lock(wait: object) -> None:
    assert callable(wait)
    with locks.lock("heap"), pytest.raises(LockOrderError, match="wait while holding"):
        wait()


def test_another_threads_locks_do_not_matter() -> None:
    first, second = locks.lock("store"), locks.lock("pool")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with second:
            held.set()
            assert done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    with first:
        done.set()
    thread.join(30)


def test_an_engine_whose_locks_are_inverted(tmp_path: Path) -> None:
    this = case("gpt")
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path))
    engine = engine_of(model)
    this.loss(model, this.batches[0]).backward()
    with engine.pool._lock, pytest.raises(LockOrderError):
        engine.store.wait_written()
    optimizer.step()
    infinity.close(optimizer)


def test_every_lock_has_its_place() -> None:
    """No lock is made elsewhere, each name is used by one file, and the documents list them all."""
    used: dict[str, set[str]] = {}
    for path in (ROOT / "infinity").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if path.name != "locks.py" and "cli" not in path.parts:
                assert called not in ("threading.Lock", "threading.RLock", "threading.Condition"), path
            if called == "lock":
                used.setdefault(ast.literal_eval(node.args[0]), set()).add(path.name)
    assert used.keys() == set(locks.ORDER)
    assert all(len(files) == 1 for files in used.values())
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## Threads and locks")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, flags=re.M)) == locks.ORDER
