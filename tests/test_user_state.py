"""Whatever `save` takes as `state`, `load` gives back."""

from __future__ import annotations

import collections
import enum
import json
import math
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.api.user_state import decode, encode


class Colour(enum.IntEnum):
    RED = 1


class Name(str, enum.Enum):
    A = "a"


class Stateful:
    """A scheduler, as it were."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


def through_json(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, tensors))), tensors, "here")


def test_what_is_taken_comes_back() -> None:
    tensor = torch.arange(6).reshape(2, 3)
    value = {
        **{"none": None, "true": True, "int": 10**20, "float": math.inf, "text": "$set", "bytes": b"\0a"},
        "dict": {(1, ("a", None)): 2, frozenset([1, b"x"]): 3, 0.5: 4, None: 5},
        "sets": [{1, "a"}, frozenset([(2, frozenset([(3, frozenset())]))])],
        "nested": [(), [[]], {"x": (1, [2, {"y": (3,)}])}],
        "counter": collections.Counter("aab"),
    }
    again = through_json(value)
    assert again == value
    assert [type(s) for s in again["sets"]] == [set, frozenset]
    assert type(again["counter"]) is collections.Counter
    assert math.isnan(through_json(math.nan))
    # What has a close relative comes back as that.
    for given, wanted in (
        (Colour.RED, 1),
        (Name.A, "a"),
        (np.float32(2), 2.0),
        (np.int8(-3), -3),
        (np.bool_(True), True),
        (bytearray(b"ab"), b"ab"),
        (collections.deque([1, (2,)]), [1, (2,)]),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (Stateful({"a": [Stateful(1)]}), {"a": [1]}),
    ):
        found = through_json(given)
        assert found == wanted
        assert type(found) is type(wanted)
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64):
        assert torch.equal(through_json([tensor.to(dtype).t()])[0], tensor.to(dtype).t())
    assert torch.equal(through_json(torch.tensor([1 + 2j]).conj().imag), torch.tensor([-2.0]))
    assert through_json(nn.Parameter(torch.ones(2))).tolist() == [1.0, 1.0]
    array = through_json({"a": tensor.half().numpy().T})["a"]
    assert isinstance(array, np.ndarray)
    assert np.array_equal(array, tensor.half().numpy().T)
    assert array.dtype == np.float16
    deepest: Any = ()
    for _ in range(98):
        deepest = {1: deepest}
    assert through_json(deepest) == deepest
