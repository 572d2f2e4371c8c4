"""What waits in the engine is needed: the lagging device catches the engine without it (tests/lagging).

`tests/lagging/mutations.md` has a row for each point of synchronisation; `python -m tests.lagging.mutations`
makes it again, and its docstring says how.
"""

from __future__ import annotations

import pytest

from .lagging.mutations import NOT_CAUGHT, all_points, caught_by, found_in, table

CAUGHT = [name for name, says in table().items() if not says.startswith(NOT_CAUGHT)]
#: A wait of the device, one of the host, one for a stream that used the memory, and one before the end.
FEW = [
    "params/unit.py ParamUnit._begin_load: self._device.mark()",
    "storage/pinned.py _QuotaBuffers.take_returned: is_over(event)",
    "grads/gradient_chunks.py GradientIO.wait: self._copied.wait()",
    "hardware/cuda_device.py CudaDevice.wait_on_device: torch.cuda.current_stream(…).wait_event(event.event)",
]


def test_the_table_has_each_point_of_synchronisation_of_the_engine() -> None:
    points, known = all_points(), table()
    assert list(known) == list(points), "run `python -m tests.lagging.mutations`"
    assert not [name for name, says in known.items() if says == f"{NOT_CAUGHT}nobody has said why"]


@pytest.mark.processes
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, id="a few", marks=pytest.mark.integration),
        *(
            pytest.param(CAUGHT[at : at + 20], id=str(at), marks=pytest.mark.nightly)
            for at in range(0, len(CAUGHT), 20)
        ),
    ],
)
def test_the_engine_without_a_point_of_synchronisation_is_caught(names: list[str]) -> None:
    for name in names:
        by = caught_by(name)
        assert by is not None
        assert found_in(name, *by), name
