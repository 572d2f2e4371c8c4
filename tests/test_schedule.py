"""The recorded order predicts, and a changed order never stalls it."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.schedule import Schedule


def test_nothing_is_predicted_before_a_cycle_is_complete() -> None:
    schedule = Schedule()
    schedule.note(0)
    assert list(schedule.upcoming()) == []


def test_the_next_units_of_the_last_cycle_are_predicted_across_its_end() -> None:
    schedule = Schedule()
    for unit in (0, 1, 2, 2, 1, 0):
        schedule.note(unit)
    schedule.end_cycle()
    schedule.note(0)
    assert list(islice(schedule.upcoming(), 3)) == [1, 2, 1]
    for unit in (1, 2, 1):
        schedule.note(unit)
    assert list(islice(schedule.upcoming(), 2)) == [0, 0]


def test_a_skipped_unit_moves_the_position() -> None:
    schedule = Schedule()
    for unit in (0, 1, 2, 3):
        schedule.note(unit)
    schedule.end_cycle()
    schedule.note(0)
    schedule.note(2)  # 1 was skipped
    assert next(schedule.upcoming()) == 3


def test_an_unknown_unit_does_not_move_the_position() -> None:
    schedule = Schedule()
    for unit in (0, 1):
        schedule.note(unit)
    schedule.end_cycle()
    schedule.note(0)
    schedule.note(9)
    assert next(schedule.upcoming()) == 1


def test_orders_that_come_back_are_known_again() -> None:
    schedule = Schedule()
    full, early = [0, 1, 2, 3, 4, 3, 2, 1, 0], [0, 1, 2, 1, 0]
    for cycle in (full, early):
        for unit in cycle:
            schedule.note(unit)
        schedule.end_cycle()
    for unit in (0, 1, 2):
        schedule.note(unit)
    assert next(schedule.upcoming()) == 1  # as in the last cycle
    schedule.note(3)  # no: as in the one before it
    assert list(islice(schedule.upcoming(), 3)) == [4, 3, 2]


@given(st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=6))
def test_any_order_is_accepted(cycles: list[list[int]]) -> None:
    schedule = Schedule()
    seen: set[int] = set()
    for cycle in cycles:
        for unit in cycle:
            schedule.note(unit)
            assert set(schedule.upcoming()) <= seen
        schedule.end_cycle()
        seen |= set(cycle)
