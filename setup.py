"""Builds the two native modules. Neither needs torch, CUDA, libaio or liburing headers."""

from __future__ import annotations

import os
import platform
from typing import Any

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

COMMON = ["-O3", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
# One file, one instruction set: only these functions may use it, and only after the run-time
# check in dispatch.cpp. No -mfma and no -march=native: [Note: one rounding per operation].
# adam_neon.cpp needs no flags: every 64-bit Arm processor has NEON.
X86 = {
    "adam_avx2.cpp": ["-mavx2", "-mf16c"],
    "adam_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"],
}
SVE = {f"adam_sve{n}.cpp": ["-march=armv8.2-a+sve", f"-msve-vector-bits={n}"] for n in (256, 512)}
PER_FILE = {"x86_64": X86, "amd64": X86, "aarch64": SVE}.get(platform.machine().lower(), {})


class BuildNative(build_ext):
    """`build_ext` that gives single source files flags of their own."""

    def build_extensions(self) -> None:
        compile_one = getattr(self.compiler, "_compile", None)
        if compile_one is None:
            return super().build_extensions()

        def compile_with_isa(obj: str, src: str, ext: str, cc_args: Any, postargs: Any, pp: Any) -> None:
            flags = PER_FILE.get(os.path.basename(src), [])
            compile_one(obj, src, ext, cc_args, [*postargs, *flags], pp)

        self.compiler._compile = compile_with_isa  # type: ignore[union-attr,attr-defined]
        return super().build_extensions()


setup(
    cffi_modules=["csrc/aio/aio_build.py:ffibuilder"],
    ext_modules=[
        Pybind11Extension(
            "infinity._cpu_adam",
            [
                f"csrc/cpu_adam/{name}.cpp"
                for name in (
                    *("adam_scalar", "adam_avx2", "adam_avx512", "adam_neon", "adam_sve256", "adam_sve512"),
                    *("dispatch", "pool", "module"),
                )
            ],
            include_dirs=["csrc/cpu_adam"],
            depends=[
                f"csrc/cpu_adam/{name}" for name in ("adam.h", "adam_lane.inl", "adam_sve.inl", "rules.h")
            ],
            extra_compile_args=COMMON,
            extra_link_args=["-pthread"],
            cxx_std=17,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
