"""State dicts of bitsandbytes' optimizers as those of torch's, and back, without bitsandbytes.

bitsandbytes keeps a moment as codes (uint8) of a dynamic map (``qmap``), 256 values up to 1, with the largest
magnitude of each block of 256 elements (``absmax``). Moments of small parameters are in fp32. State dicts of
paged optimizers are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import torch
from torch.nn.functional import pad

from infinity.core.errors import StateDictError
from infinity.planning.parts import ADAM, SQUARES

#: Under this key newer versions have what FSDP must not see.
_NESTED: Final = "__bnb_optimizer_quant_state__"
#: Options of AdEMAMix that AdamW has as well, and what they are there.
_ADEMAMIX: Final = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
_BLOCK: Final = 256
_SLICE: Final = 1 << 20  # elements at once


def from_bitsandbytes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of bitsandbytes' AdamW, Adam or Lion as one of torch's AdamW or of `Lion`.

    The moments are in fp32, and have the values of the codes exactly. `load_state_dict` of a wrapped
    optimizer takes it, and keeps the moments in the form of its `Config(optimizer_state_dtype=…)`. A state
    dict does not tell Lion from bitsandbytes' other optimizers with one moment.

    Raises:
        StateDictError: it is of another optimizer, or has options that `wrap` does not know.
    """
    _check(state_dict)
    for index, group in enumerate(state_dict["param_groups"]):
        if group.get("alpha") or len(group.get("betas", ())) != 2:
            found = f"alpha={group.get('alpha')!r}, betas={group.get('betas')!r} in param group {index}"
            _refuse("this is no state of AdamW, Adam or Lion", "two betas, and no alpha", found)
    states = {index: _torch_state(state, index) for index, state in state_dict["state"].items()}
    # Their Adam decays the weights as their AdamW does.
    adamw = {"decoupled_weight_decay": True, "amsgrad": False}
    more = adamw if any(ADAM[1] in state for state in states.values()) else {}
    groups = [
        {**{k: v for k, v in group.items() if k not in _ADEMAMIX}, **more}
        for group in state_dict["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


def to_bitsandbytes(state_dict: Mapping[str, Any], *, min_8bit_size: int = 4096) -> dict[str, Any]:
    """Return a state dict of AdamW or Lion, wrapped or not, as one of bitsandbytes' AdamW8bit or Lion8bit.

    What `from_bitsandbytes` returned becomes the same codes again. Other moments become the nearest codes. In
    a block of zeros every code is 0, as before the first step. Masters are left out.

    Args:
        min_8bit_size: parameters with fewer elements keep fp32 moments, as in bitsandbytes.

    Raises:
        StateDictError: it is of another optimizer, has options that bitsandbytes does not know, or moments
            that are not finite.
    """
    _check(state_dict)
    states = {
        index: _their_state(state, index, min_8bit_size) for index, state in state_dict["state"].items()
    }
    two = any("state2" in state for state in states.values())
    groups = []
    for index, group in enumerate(state_dict["param_groups"]):
        unknown = [k for k in ("maximize", "amsgrad", "caution", "corrected_weight_decay") if group.get(k)]
        if two and "capturable" in group and "amsgrad" not in group:  # torch's RAdam has AdamW's moments
            unknown.append("capturable")
        if two and group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
            unknown.append("weight_decay")  # that of torch's Adam, which is added to the gradient
        if unknown:
            found = ", ".join(f"{k}={group[k]!r}" for k in unknown) + f" in param group {index}"
            _refuse("bitsandbytes does not know these options", "AdamW or Lion without them", found)
        kept = {k: v for k, v in group.items() if k not in ("decoupled_weight_decay", "amsgrad")}
        groups.append({"eps": 0.0, **kept, **(_ADEMAMIX if two else {})})
    return {"state": states, "param_groups": groups}


def _check(state_dict: Mapping[str, Any]) -> None:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        found = (
            ", ".join(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        )
        _refuse("this is no state dict of an optimizer", "state and param_groups", found)


def _torch_state(state: Mapping[str, Any], index: object) -> dict[str, Any]:
    state = {**{k: v for k, v in state.items() if k != _NESTED}, **state.get(_NESTED, {})}
    if not state:
        return {}
    own = [k for k in ("gnorm_vec", "unorm_vec") if k in state]
    if own:
        _refuse(
            "bitsandbytes clipped these gradients or updates by their history",
            "percentile_clipping=100 and max_unorm=0",
            f"{' and '.join(own)} of parameter {index}",
            "remove these from each state, and clip with Config(max_grad_norm=…)",
        )
    if "state1" not in state or "step" not in state:
        _refuse("this state is not of bitsandbytes", "step and state1", f"{', '.join(state)} of {index}")
    moments = {"step": torch.tensor(float(state["step"]), dtype=torch.float32)}
    for number, name in enumerate(ADAM, 1):
        if (codes := state.get(f"state{number}")) is not None:
            qmap, absmax = state.get(f"qmap{number}"), state.get(f"absmax{number}")
            moments[name] = _decoded(codes, qmap, absmax, index)
    return moments


def _decoded(
    codes: torch.Tensor, qmap: torch.Tensor | None, absmax: torch.Tensor | None, index: object
) -> torch.Tensor:
    if codes.dtype is torch.float32:
        return codes
    if codes.dtype is not torch.uint8 or qmap is None or absmax is None:
        _refuse(
            "these moments are not in blocks",
            "fp32; or uint8, with qmap and absmax",
            f"{codes.dtype} with{'out' * (qmap is None)} qmap, with{'out' * (absmax is None)} absmax "
            f"of parameter {index}",
            "train with block_wise=True, the default; or begin without moments",
        )
    numel, count = codes.numel(), absmax.numel()
    # The least power of two: 256, or 2048 in older versions.
    block = 1 << (-(-numel // max(count, 1)) - 1).bit_length()
    if qmap.numel() != 256 or -(-numel // block) != count or not codes.is_contiguous():
        found = f"{numel} codes, stride {codes.stride()}, {count} blocks and {qmap.numel()} values"
        expected = "contiguous codes, in blocks of a power of two, and 256 values"
        _refuse(f"codes of parameter {index} do not fit their scales", expected, found)
    values = torch.empty_like(codes, dtype=torch.float32)
    flat, given, at_once = values.view(-1), codes.view(-1), max(_SLICE // block, 1) * block
    for begin in range(0, numel, at_once):
        part = given[begin : begin + at_once]
        scales = absmax[begin // block : (begin + at_once) // block].repeat_interleave(block)[: part.numel()]
        torch.mul(qmap[part.int()], scales, out=flat[begin : begin + at_once])
    return values


def _their_state(state: Mapping[str, Any], index: object, least: int) -> dict[str, Any]:
    if not state:
        return {}
    lacking = [k for k in ("exp_avg", *(["step"] if ADAM[1] in state else [])) if k not in state]
    other = [k for k, value in state.items() if k not in ("step", *ADAM) and value is not None]
    if lacking or other:
        found = f"{', '.join(state)} of parameter {index}"
        _refuse("this is no state of AdamW or Lion", "step, exp_avg and exp_avg_sq; or exp_avg alone", found)
    theirs: dict[str, Any] = {"step": int(state.get("step", 1))}
    for number, name in enumerate(ADAM, 1):
        if (values := state.get(name)) is None:
            continue
        wide = values.detach().float()
        if not wide.isfinite().all():
            _refuse("their codes have no Inf and no NaN", "finite moments", f"{name} of parameter {index}")
        if wide.numel() < least:
            theirs[f"state{number}"] = wide
        else:
            qmap = dynamic_map(signed=name not in SQUARES).to(wide.device)
            codes, absmax = _encoded(wide, qmap)
            theirs |= {f"state{number}": codes, f"qmap{number}": qmap, f"absmax{number}": absmax}
    return theirs


@functools.cache
def dynamic_map(*, signed: bool) -> torch.Tensor:
    """Return the values of the codes: in each power of ten, twice as many as in the one below it."""
    values = [0.0, 1.0]
    for digits in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (digits if signed else digits + 1) + 1, dtype=torch.float32)
        means = 10 ** (digits - 6) * ((ends[:-1] + ends[1:]) / 2)
        values += [*means.tolist(), *((-means).tolist() if signed else ())]
    return torch.tensor(sorted(values), dtype=torch.float32)


def _encoded(values: torch.Tensor, qmap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest codes and the scales of fp32 values."""
    flat, codes = values.reshape(-1), torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales = []
    for begin in range(0, flat.numel(), _SLICE):
        part = flat[begin : begin + _SLICE]
        blocks = pad(part, (0, -part.numel() % _BLOCK)).view(-1, _BLOCK)
        found, largest = _encoded_blocks(blocks, qmap)
        codes.view(-1)[begin : begin + _SLICE] = found.view(-1)[: part.numel()]
        scales.append(largest)
    return codes, torch.cat(scales)


def _encoded_blocks(blocks: torch.Tensor, qmap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = blocks.abs().amax(1)
    codes, exact = _nearest(blocks, scales, qmap)
    # There is no code for -1: a block whose largest is negative has it as a little less. If there is a scale
    # with which codes have exactly the values of the block, the block was made of these.
    least = qmap[0]
    rest = torch.nonzero(~exact & (blocks.amin(1) == -scales)).flatten() if least < 0 else exact.new_empty(0)
    for way in (0, 1, -1) if len(rest) else ():
        tried = (scales[rest].double() / -least.double()).float()
        tried = torch.nextafter(tried, torch.full_like(tried, way * torch.inf)) if way else tried
        found, exact = _nearest(blocks[rest], tried, qmap)
        theirs = rest[exact]
        codes[theirs], scales[theirs], rest = found[exact], tried[exact], rest[~exact]
    return codes, scales


def _nearest(
    blocks: torch.Tensor, scales: torch.Tensor, qmap: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest codes, and of which blocks they have exactly the values."""
    wide = qmap.double()
    some = (scales > 0)[:, None]
    within = blocks.double() / torch.where(some, scales.double()[:, None], 1.0)
    codes = torch.bucketize(within, (wide[1:] + wide[:-1]) / 2)
    exact = (qmap[codes] * scales[:, None] == blocks).all(1)
    return torch.where(some, codes, 0).to(torch.uint8), exact


def _refuse(
    what: str, expected: str, found: str, cure: str = "convert a state dict of AdamW or Lion"
) -> NoReturn:
    raise StateDictError(what, expected=expected, found=found, cure=cure)
