"""Compares Triton's kernel of the rules, in Triton's interpreter on the CPU, with the native one; and
compiles it for a GPU, which needs none.

TRITON_INTERPRET=1 python -m tests.fused_bits       (on the path: a triton that torch need not know)
python -m tests.fused_bits
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from typing import Any

import torch

from infinity.core.sizes import ceil_to
from infinity.hardware import adam_fused, adam_reference, cpu_adam

from .device_bits import CHECKS, OPTIONS, adam_segment, any_bits, same


def any_values() -> list[str]:
    """Updates of what there is of floats: infinities, NaNs and subnormals among them."""
    n, differ = 20_000, []
    bits = any_bits(4 * n, torch.float32).view(4, n)
    draw = torch.Generator().manual_seed(0)
    codes = [torch.randint(256, (n,), generator=draw, dtype=torch.uint8) for _ in range(2)]
    bases = [torch.randint(0x7F8 - most, (ceil_to(n, 256) // 256,), generator=draw) for most in (127, 255)]
    scales = [(base << 20).int().view(torch.float32) for base in bases]
    for begin, moments in ((7, [bits[1], bits[2].abs()]), (256, [*codes, *scales])):
        here, there = ([bits[0].clone(), *(moment.clone() for moment in moments)] for _ in range(2))
        segments = [adam_segment(begin, n - begin, **OPTIONS)]
        cpu_adam.update_segments(here[0], here[1:], bits[3], None, segments)
        adam_reference.reference_segments(there[0], there[1:], bits[3], None, segments)
        if not all(map(same, here, there)):
            differ.append(f"any values, {len(moments)} tensors of moments")
    return differ


def main() -> int:
    """Print what differs; fail if something does, or if the kernel was not what ran."""
    warnings.filterwarnings("ignore", "(overflow|invalid|divide)", RuntimeWarning)  # numpy's
    warnings.filterwarnings("error", "the optimizer on", RuntimeWarning)
    adam_reference._FUSED_ON.add("cpu")
    inner, ran = adam_fused.update, 0

    def update(*given: Any) -> None:
        nonlocal ran
        ran += 1
        inner(*given)

    adam_fused.update = update
    checks = [check for name, check in CHECKS.items() if name.startswith(("adam", "segments", "rules"))]
    differ = [text for check in checks for text in check("cpu")] + any_values()
    sys.stdout.write("\n".join([*differ, f"{len(checks) + 1} checks\n"]))
    return 1 if differ or ran < len(checks) else 0


def compile_all() -> int:
    """Compile each kind of kernel; fail if something is contracted, approximated or flushed to zero: each
    operation is rounded once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, options = adam_fused._update, {"enable_fp_fusion": False}
    kinds = itertools.product((80, 90), ("bf16", "fp16", "fp32"), range(5), range(3), *2 * [(False, True)])
    compiled, wrong = 0, []
    for capability, grad, rule, form, has_l2, flag in kinds:
        moment, scales = ("*fp32", "*i16", "*u8")[form], "*i32" if form == 2 else "*fp32"
        fixed = {"flag": flag, "rule": rule, "has_l2": has_l2, "form": form, "block": 1024, "coded": 256}
        signature = dict.fromkeys(kernel.arg_names, "fp32") | dict.fromkeys(fixed, "constexpr")
        signature |= {"master": "*fp32", "first_moment": moment, "second_moment": moment, "grad": f"*{grad}"}
        signature |= {"first_scales": scales, "second_scales": scales}
        signature |= {"first": "i32", "last": "i32", "place": "i64", "key": "i32"}
        source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
        compiled += 1
        words = [word for word in ("fma.", ".ftz", ".approx", "div.full") if word in ptx]
        wrong += [f"{capability}, {grad}, {fixed}: {words}"] if words else []
    sys.stdout.write("\n".join([*wrong, f"{compiled} kernels\n"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main() if os.environ.get("TRITON_INTERPRET") else compile_all())
