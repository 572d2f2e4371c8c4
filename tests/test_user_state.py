"""Whatever `save` takes as `state`, `load` gives back."""

from __future__ import annotations

import collections
import enum
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from infinity.api.user_state import decode, encode
from infinity.core.errors import StateDictError
from infinity.hardware.aio import Ring
from infinity.storage.tensor_file import read_all, write_all


class Colour(enum.IntEnum):
    RED = 1


class Name(str, enum.Enum):
    A = "a"


class HashableList(list[Any]):
    __hash__ = object.__hash__  # type: ignore[assignment]


class Stateful:
    """A scheduler, as it were."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


def through_json(value: Any, folder: Path | None = None) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    encoded = json.loads(json.dumps(encode(value, tensors)))
    if folder is not None:
        with Ring("test", path=str(folder)) as ring:
            sums = write_all(str(folder / "values"), tensors, ring)
            tensors = read_all(str(folder / "values"), ring, sums)
    return decode(encoded, tensors, "here")


def plain(value: Any) -> Any:
    """What a value is when it has come back, as what can be compared and hashed."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.tolist().__repr__()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, repr(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, float):
        return "float", repr(float(value))
    if isinstance(value, (bool, int, str)):
        kind = next(k for k in (bool, int, str) if isinstance(value, k))
        return kind.__name__, kind(value.value if isinstance(value, enum.Enum) else value)
    if isinstance(value, Stateful):
        return plain(value.state)
    if isinstance(value, collections.abc.Mapping):
        kind_ = "counter" if isinstance(value, collections.Counter) else "dict"
        return kind_, tuple((plain(k), plain(v)) for k, v in value.items())
    if isinstance(value, (list, collections.deque)):
        return "list", tuple(map(plain, value))
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, frozenset(map(plain, value))
    if isinstance(value, tuple):
        return "tuple", tuple(map(plain, value))
    assert value is None
    return value


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from(
        [
            "$set",
            Colour.RED,
            Name.A,
            np.float64(0.5),
            np.float32(2),
            np.int8(-3),
            np.bool_(True),
            np.str_("é"),
        ]
    )
)
keys = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


def tensors(*dtypes: torch.dtype) -> Any:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(
        lambda d, s: torch.arange(math.prod(s)).reshape(s).to(d), st.sampled_from(dtypes), shapes
    )


leaves = (
    keys
    | tensors(torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64)
    | tensors(torch.bool, torch.int16, torch.float16, torch.float64).map(lambda t: t.numpy().T)
    | tensors(torch.complex64).map(lambda t: t.add(1j).conj().imag)
    | st.sampled_from([bytearray(b"ab"), nn.Parameter(torch.ones(2))])
    | st.sets(keys, max_size=3)
    | st.lists(keys, max_size=3).map(collections.Counter)
)
everything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict)
        | inner.map(Stateful)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(value=everything)
def test_what_is_taken_comes_back(value: Any) -> None:
    assert plain(through_json(value)) == plain(value)


def test_frozensets_stay_what_they_are(tmp_path: Path) -> None:
    value = {
        "seen": {frozenset([1]), (b"", None), (2, frozenset([(3, frozenset())]))},
        "named": {frozenset([1]): 2, (frozenset([1]), b"x"): frozenset([frozenset()])},
        "tensor": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    again = through_json(value, tmp_path)
    assert [again[k] for k in ("seen", "named")] == [value[k] for k in ("seen", "named")]
    assert all(type(s) is not set for s in again["seen"])
    assert torch.equal(again["tensor"], value["tensor"])  # type: ignore[arg-type]
    assert torch.equal(again["negative"], value["negative"])  # type: ignore[arg-type]


def test_the_deepest_that_is_taken_comes_back() -> None:
    value: Any = ()
    for _ in range(98):
        value = {1: value}
    assert through_json(value) == value


@pytest.mark.parametrize(
    "value",
    [
        {HashableList()},
        {(1, HashableList()): 2},
        {Stateful({"a": 1})},
        collections.Counter([HashableList()]),
        10**5000,
        -(10**5000),
        np.ma.array([1, 2], mask=[True, False]),
        np.longdouble(1),
        1j,
        nn.Linear,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_come_back_is_refused(value: Any) -> None:
    with pytest.raises(StateDictError, match="cannot be saved"):
        encode({"x": [value]}, {})
