"""The device that a benchmark runs on, by name: one of torch's, or a double of CUDA on the CPU.

The double (tests/lagging) runs the engine's own `CudaDevice` over the CPU's memory. It is there so that tests
run what is otherwise only run on a GPU; its times mean nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

#: The name of the double.
LAGGING: Final = "lagging"


@contextlib.contextmanager
def opened(device: str) -> Iterator[str]:
    """Have the device there inside of this. Yields what `infinity.Config` calls it; torch calls it `device`.

    Raises:
        Finding: the double has seen something that nothing orders.
    """
    if device != LAGGING:
        yield device
        return
    from tests.lagging.cuda import lagging_cuda  # not at the top: it needs pytest

    with lagging_cuda("eager"):
        yield "cuda"
