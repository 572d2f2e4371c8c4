"""Latches and bells: no wake-up is lost, and an exception at any point leaves nothing locked."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from infinity.core.waiting import Bell, Latch
from infinity.hardware.deferral import Deferral, deferred

from .interrupts import points_of


class Handler(Exception):
    """What a signal handler raises."""


def raised_at_each_point(call: Callable[[], object], file: str) -> int:
    """Call `call` again and again, each time with an exception at the next of the points in `file` where
    a handler could run, until it returns; return how often."""
    count = 0
    while True:
        left = count

        def pass_point() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Handler

        def local(frame: FrameType, event: str, arg: object) -> Any:
            if event == "opcode" and frame.f_lasti in points_of(frame.f_code):
                pass_point()
            return local

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            if frame.f_code.co_filename != file:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            pass_point()
            return local

        sys.settrace(trace)
        try:
            call()
            return count
        except Handler:
            count += 1
        finally:
            sys.settrace(None)


def test_all_who_wait_for_a_latch_pass_when_it_opens() -> None:
    latch, passed = Latch(), queue.SimpleQueue[bool]()
    threads = [threading.Thread(target=lambda: passed.put(latch.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not latch.wait(0.02)
    assert not latch.is_open
    latch.open()
    for thread in threads:
        thread.join(10)
    assert [passed.get(timeout=1) for _ in threads] == [True] * 5
    latch.open()
    assert latch.wait(0)
    assert latch.wait()


def test_no_ring_is_lost_between_the_look_and_the_sleep() -> None:
    bell, numbers = Bell(), [0]
    slowest = 0.0
    done = threading.Event()

    def count() -> None:
        for _ in range(3000):
            numbers[0] += 1
            bell.ring()
        done.set()

    thread = threading.Thread(target=count)
    thread.start()
    while not done.is_set():
        seen = numbers[0]
        begin = time.monotonic()
        bell.wait(lambda seen=seen: numbers[0] != seen or done.is_set(), 30)  # type: ignore[misc]
        slowest = max(slowest, time.monotonic() - begin)
    thread.join()
    assert slowest < 20


def test_who_has_slept_long_enough_leaves_nothing_behind() -> None:
    bell = Bell()
    for _ in range(3):
        bell.wait(lambda: False, 0.001)
    assert not bell._sleepers


def test_an_exception_at_any_point_of_a_wait_leaves_it_usable() -> None:
    bell, latch = Bell(), Latch()
    file = Bell.ring.__code__.co_filename
    assert raised_at_each_point(lambda: bell.wait(lambda: False, 0.001), file) > 3
    assert raised_at_each_point(bell.ring, file) > 1
    assert raised_at_each_point(lambda: latch.wait(0.001), file) > 5
    thread = threading.Timer(0.01, latch.open)
    thread.start()
    assert latch.wait(30)


class Account:
    """Two numbers that must be equal."""

    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral
        self.a = self.b = 0
        self.slow = threading.Event()
        self.slow.set()

    @deferred
    def add(self) -> int:
        self.a += 1
        self.slow.wait(30)
        self.b += 1
        return self.b

    @deferred
    def fail(self) -> None:
        self.slow.wait(30)
        raise ValueError("mine")


@pytest.fixture
def account() -> Any:
    deferral = Deferral(lambda: contextlib.nullcontext)
    yield Account(deferral)
    assert deferral.close()


def test_a_deferred_call_happens_wholly_or_not_at_all(account: Account) -> None:
    file = Deferral.run.__code__.co_filename

    def add() -> None:
        account.add()
        account.deferral.wait_interrupted()

    raised_at_each_point(add, file)
    account.deferral.wait_interrupted()
    assert account.a == account.b > 0


def test_the_next_call_waits_for_what_an_interrupt_left(account: Account) -> None:
    account.slow.clear()
    interrupted(account.add)
    assert (account.a, account.b) == (1, 0)
    threading.Timer(0.05, account.slow.set).start()
    assert account.add() == 2


def test_what_failed_after_an_interrupt_is_raised_once_by_the_next_call(account: Account) -> None:
    account.slow.clear()
    interrupted(account.fail)
    account.slow.set()
    with pytest.raises(ValueError, match="mine"):
        account.add()
    assert account.add() == 1
    with pytest.raises(ValueError, match="mine"):
        account.fail()
    assert account.add() == 2


def interrupted(call: Callable[[], object]) -> None:
    """Make a call and end the wait for it, as a signal handler would."""
    import signal

    def handler(number: int, frame: FrameType | None) -> None:
        raise Handler

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Handler):
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_other_threads_and_calls_within_calls_are_made_at_once(account: Account) -> None:
    deferral, names = account.deferral, []

    def note() -> None:
        names.append(threading.current_thread().name)
        assert not torch.is_grad_enabled()

    deferral.run(lambda: deferral.run(note))
    thread = threading.Thread(target=lambda: deferral.run(note), name="other")
    thread.start()
    thread.join()
    deferral.close()
    deferral.run(note)
    assert names == ["infinity-deferral", "other", threading.current_thread().name]
