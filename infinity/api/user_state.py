"""Users' values as JSON and tensors, and back: the further state in a checkpoint.

It contains no code, and the engine guesses nothing: a value of another kind is an error that names it. A
value that JSON does not support is a mapping with one key that begins with ``$``.
"""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from infinity.core.errors import CorruptionError, StateDictError
from infinity.storage.tensor_header import DTYPES

_KINDS: Final = "JSON values, bytes, tensors, numpy arrays; lists, tuples, sets and dicts of these; "
_DEPTH: Final = 100
_INT_BITS: Final = 14_000  # what has more is refused by Python's own reader of decimal numbers
#: What makes the plain value of one of a class of its own, whatever that says of itself.
_PLAIN: Final[dict[type, Callable[[Any], Any]]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}
_TOKENIZERS: Final = {
    "transformers.tokenization_utils_base.PreTrainedTokenizerBase",
    "transformers.processing_utils.ProcessorMixin",
}


def check_named(state: Any) -> None:
    """Raise `StateDictError` unless `state`, of `save` or `load`, has its values by name."""
    if state is not None and not isinstance(state, Mapping):
        raise StateDictError(
            "`state` does not map names to values",
            expected="a dict: name → value, or an object with a `state_dict`",
            found=f"{type(state).__module__}.{type(state).__qualname__}",
            cure='state={"scheduler": scheduler}',
        )


def encode(value: Any, tensors: dict[str, torch.Tensor], where: str = "state", depth: int = 0) -> Any:
    """Return `value` as JSON has it, with its tensors in `tensors` (on the host, by their place).

    Raises:
        StateDictError: it contains a value that `save` does not support.
    """
    if isinstance(value, int) and value.bit_length() > _INT_BITS:
        raise _refused(where, f"an int of {value.bit_length()} bits")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > _DEPTH:
        raise _refused(where, "values nested more than a hundred deep, or in themselves")
    if isinstance(value, torch.Tensor):
        return {"$tensor": _keep(value.detach(), tensors, where)}
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        try:
            tensor = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
        except (TypeError, ValueError):
            raise _refused(where, f"a numpy array of {value.dtype}") from None
        return {"$array": _keep(tensor, tensors, where)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _keep(torch.from_numpy(np.frombuffer(value, np.uint8).copy()), tensors, where)}
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, where, depth + 1)
    if isinstance(value, (bool, int, float, str)):  # of a class of its own: an enum of ints, numpy's float
        return next(plain(value) for kind, plain in _PLAIN.items() if isinstance(value, kind))
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, where, depth)
    if isinstance(value, (list, collections.deque)):
        return [encode(v, tensors, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(v, tensors, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]}
    if isinstance(value, (set, frozenset)):
        kind = "$set" if isinstance(value, set) else "$frozenset"
        return {kind: [_encode_hashable(v, tensors, f"an element of {where}", depth + 1) for v in value]}
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return encode(value.state_dict(), tensors, f"{where}.state_dict()", depth + 1)
    raise _refused(where, f"{type(value).__module__}.{type(value).__qualname__}")


def _encode_mapping(
    value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], where: str, depth: int
) -> Any:
    plain = all(type(k) is str and not k.startswith("$") for k in value)
    if plain and not isinstance(value, collections.Counter):
        return {k: encode(v, tensors, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
    pairs = [
        [
            _encode_hashable(k, tensors, f"a key of {where}", depth + 1),
            encode(v, tensors, f"{where}[{k!r}]", depth + 1),
        ]
        for k, v in value.items()
    ]
    return {"$counter" if isinstance(value, collections.Counter) else "$dict": pairs}


def _encode_hashable(value: Any, tensors: dict[str, torch.Tensor], where: str, depth: int) -> Any:
    encoded = encode(value, tensors, where, depth)
    if not _comes_back_hashable(encoded):
        raise _refused(where, f"{type(value).__qualname__}, which would come back as what has no hash")
    return encoded


def _comes_back_hashable(encoded: Any) -> bool:
    if not isinstance(encoded, dict):
        return not isinstance(encoded, list)
    for kind in ("$tuple", "$frozenset"):
        if kind in encoded:
            return all(map(_comes_back_hashable, encoded[kind]))
    return "$bytes" in encoded or "$tensor" in encoded


def _keep(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], where: str) -> str:
    odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
    if tensor.dtype not in DTYPES.values() or odd:
        raise _refused(where, f"a tensor of {tensor.dtype}, {tensor.layout}")
    if tensor.device.type == "meta":
        raise _refused(where, "a tensor on the meta device, which has no values")
    name, number = where, 1
    while name in tensors:
        number += 1
        name = f"{where} ({number})"
    tensors[name] = tensor.resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
    return name


def _refused(where: str, found: str) -> StateDictError:
    return StateDictError(
        f"{where} cannot be saved",
        expected=f"{_KINDS}objects with a `state_dict` of these",
        found=found,
        cure="put the values that you need from it into `state`, or give it a `state_dict` and a "
        "`load_state_dict`",
    )


def is_tokenizer(value: Any) -> bool:
    """Return whether `value` is a tokenizer or processor of transformers."""
    kinds = {f"{k.__module__}.{k.__qualname__}" for k in type(value).__mro__}
    return bool(kinds & _TOKENIZERS)


def files_of(tokenizer: Any) -> dict[str, str]:
    """Return what `save_pretrained` writes for a tokenizer, by the name of the file.

    Raises:
        StateDictError: a file is not text.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [p for p in sorted(Path(folder).rglob("*")) if p.is_file()]
        try:
            return {str(p.relative_to(folder)): p.read_text(encoding="utf-8") for p in paths}
        except UnicodeDecodeError as error:
            raise _refused(
                "a tokenizer", f"files that are not text, of {type(tokenizer).__name__}"
            ) from error


def decode(value: Any, tensors: Mapping[str, torch.Tensor], path: str) -> Any:
    """Return what `encode` was given; `path`, of the checkpoint, is for messages.

    Raises:
        CorruptionError: `encode` does not produce this value.
    """
    if isinstance(value, list):
        return [decode(v, tensors, path) for v in value]
    if not isinstance(value, dict):
        return value
    special = [k for k in value if k.startswith("$")]
    if not special:
        return {k: decode(v, tensors, path) for k, v in value.items()}
    kind, inner = special[0], value[special[0]]
    try:
        if kind in _TENSORS:
            return _TENSORS[kind](tensors[inner])
        return _LISTS[kind](decode(inner, tensors, path))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"the checkpoint {path} has a value that no version of infinity saves",
            path=path,
            expected=f"one of {', '.join(sorted([*_TENSORS, *_LISTS]))}",
            found=f"{kind}",
            cure="copy this checkpoint again from its source; or load another one, if there is one",
        ) from error


_TENSORS: Final[dict[str, Callable[[torch.Tensor], Any]]] = {
    "$tensor": lambda t: t,
    "$array": lambda t: t.numpy(),
    "$bytes": lambda t: bytes(t.numpy()),
}
_LISTS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": lambda pairs: {k: v for k, v in pairs},
    "$counter": lambda pairs: collections.Counter({k: v for k, v in pairs}),
}
