"""The native CPU Adam: addresses and counts. Use `infinity.hardware.cpu_adam`, which checks.

Dtypes are numbers: 0 fp32, 1 bf16, 2 fp16, 3 none, 4 codes of 8 bits. Addresses and counts are not checked
here.
"""

SEGMENT_NBYTES: int
SPAN: int

def isa() -> str: ...
def use_isa(name: str) -> bool: ...
def available_isas() -> list[str]: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def derive(
    rule: int,
    segment: bytes,
) -> tuple[float, float, float, float, float, float, float, float, float, bool]: ...
def update(
    rule: int,
    master: int,
    split: bool,
    first: int,
    second: int,
    first_scales: int,
    second_scales: int,
    moment_dtype: int,
    grad: int,
    grad_dtype: int,
    out: int,
    out_dtype: int,
    numel: int,
    segments: bytes,
) -> None: ...
def measure(
    master: int,
    first: int,
    second: int,
    moment_dtype: int,
    grad: int,
    grad_dtype: int,
    out: int,
    out_dtype: int,
    numel: int,
    stream: bool,
) -> None: ...
def sum_of_squares(source: int, dtype: int, pieces: int, count: int, sums: int) -> None: ...
def accumulate(target: int, source: int, dtype: int, numel: int) -> None: ...
def convert(target: int, to: int, source: int, source_dtype: int, numel: int) -> None: ...
def copy_bytes(target: int, source: int, nbytes: int) -> None: ...
