"""The states of all random number generators that a training run uses."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of torch's generators (the CPU's, and that of `device`), of Python's `random`, and of
    numpy's global one."""
    kind, words, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, words, position, has_gauss, cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned; a generator that it did not have stays."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leave the generators as the block finds them."""
    before = random_state(device)
    yield
    set_random_state(before, device)


def set_random_states(states: list[dict[str, Any]], rank: int, world: int, device: torch.device) -> None:
    """Put the generators of one of `world` ranks back; `states`: of each of the ranks that saved. Where these
    were more or fewer, the first rank's go on; of another rank, torch's begin with the first rank's seed plus
    its number, as in `wrap`, and the others stay."""
    if rank == 0 or len(states) == world:
        set_random_state(states[rank], device)
        return
    torch.set_rng_state(states[0]["torch"])
    torch.manual_seed((torch.initial_seed() + rank) % (1 << 64))


def to_json(state: dict[str, Any]) -> dict[str, Any]:
    """Return what `random_state` returned as JSON has it."""
    made = {name: [*map(int, value)] for name, value in state.items() if isinstance(value, torch.Tensor)}
    kind, words, *rest = state["numpy"]
    return {**made, "python": state["python"], "numpy": [kind, [*map(int, words)], *rest]}


def of_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return what `to_json` was given."""
    version, words, gauss = value["python"]
    kind, numbers, *rest = value["numpy"]
    return {
        **{
            name: torch.tensor(v, dtype=torch.uint8) for name, v in value.items() if name in ("torch", "cuda")
        },
        "python": (version, tuple(words), gauss),
        "numpy": (kind, np.array(numbers, np.uint32), *rest),
    }
