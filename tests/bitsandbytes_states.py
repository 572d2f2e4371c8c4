"""Compares our forms of bitsandbytes' state dicts with bitsandbytes itself, and records some.

A process of its own: transformers and PEFT must not see bitsandbytes in other tests.

python -m tests.bitsandbytes_states           (on the path: bitsandbytes)
python -m tests.bitsandbytes_states record    (prints what tests/bitsandbytes.json has)
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from typing import Any

import torch

from infinity.optim import from_bitsandbytes, to_bitsandbytes
from infinity.optim.bitsandbytes import dynamic_map

NESTED = "__bnb_optimizer_quant_state__"
SHAPES = ((70, 80), (4097,), (3, 4))  # with an end of a block, with one element in the last, and in fp32


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter, whose codes newer versions have one level deeper."""
    return {**{k: v for k, v in state.items() if k != NESTED}, **state.get(NESTED, {})}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.numpy().tobytes(), digest_size=8).hexdigest()


def begin(kind: Any, shapes: Any = SHAPES, **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    return params, kind(params, lr=1e-2, weight_decay=0.1, **options)


def train(params: list[torch.nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape) * torch.randn(param.shape).mul(3).exp()
            param.grad.view(-1)[256:512] = 0  # a block of zeros
        optimizer.step()


def check(kind: Any, functional: Any) -> list[str]:
    """Return what is wrong with the states of one class."""
    params, theirs = begin(kind)
    train(params, theirs, range(3))
    saved = theirs.state_dict()
    ours = from_bitsandbytes(saved)
    coded = any("absmax1" in flat(state) for state in saved["state"].values())
    back = to_bitsandbytes(ours, min_8bit_size=4096 if coded else 1 << 62)
    wrong = [] if back["param_groups"] == saved["param_groups"] else [f"groups: {back['param_groups']}"]
    for index, state in saved["state"].items():
        of, again, moments = flat(state), back["state"][index], ours["state"][index]
        for key, value in of.items():
            if not (
                torch.equal(value, again[key]) if isinstance(value, torch.Tensor) else value == again[key]
            ):
                wrong.append(f"{key} of {index} changed")
        for number, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
            if f"absmax{number}" not in of:
                continue
            codes, scales, qmap = (of[f"{key}{number}"] for key in ("state", "absmax", "qmap"))
            values = functional.dequantize_blockwise(codes, absmax=scales, code=qmap, blocksize=256)
            if not torch.equal(values, moments[name]):
                wrong.append(f"{name} of {index} has other values")
    copies, resumed = begin(kind)
    for copy, param in zip(copies, params, strict=True):
        copy.data.copy_(param.data)
    resumed.load_state_dict(back)
    train(params, theirs, range(3, 6))
    train(copies, resumed, range(3, 6))
    if not all(map(torch.equal, params, copies)):
        wrong.append("a resumed run differs")
    return [f"{kind.__name__}: {text}" for text in wrong]


def recorded(kind: Any) -> dict[str, Any]:
    """Return a state dict as text, with digests of its values."""
    params, optimizer = begin(kind, ((5, 130), (2, 3)), min_8bit_size=7)
    train(params, optimizer, range(3))
    saved = optimizer.state_dict()
    moments = from_bitsandbytes(saved)["state"][0]
    states = {}
    for index, state in saved["state"].items():
        tensors = {k: v for k, v in flat(state).items() if isinstance(v, torch.Tensor) and "qmap" not in k}
        states[index] = {
            "step": state["step"],
            **{k: [str(v.dtype), list(v.shape), v.numpy().tobytes().hex()] for k, v in tensors.items()},
        }
    values = {k: digest(v) for k, v in moments.items() if k != "step"}
    return {"state": states, "param_groups": saved["param_groups"], "values": values}


def main() -> int:
    """Print what differs, or records."""
    import bitsandbytes
    from bitsandbytes import functional

    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    optim = bitsandbytes.optim
    if sys.argv[1:] == ["record"]:
        maps = {
            name: digest(functional.create_dynamic_map(signed=name == "signed"))
            for name in ("signed", "unsigned")
        }
        record: dict[str, Any] = {"version": bitsandbytes.__version__, "maps": maps}
        record |= {kind.__name__: recorded(kind) for kind in (optim.AdamW8bit, optim.Lion8bit)}
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
        return 0
    kinds = [optim.AdamW8bit, optim.PagedAdamW8bit, optim.Adam8bit, optim.AdamW, optim.Lion8bit]
    kinds += [optim.PagedLion8bit, optim.Lion]
    wrong = [text for kind in kinds for text in check(kind, functional)]
    for signed in (True, False):
        if not torch.equal(dynamic_map(signed=signed), functional.create_dynamic_map(signed=signed)):
            wrong.append(f"another map, signed={signed}")
    sys.stdout.write("\n".join([*wrong, f"{len(kinds)} optimizers\n"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
