from typing_extensions import Buffer

def amax(src: Buffer, dtype: str, /) -> tuple[float, int, int]: ...
def nvfp4_quantize(
    src: Buffer, dtype: str, k: int, global_scale: float, out_codes: Buffer, out_scales: Buffer, /
) -> tuple[int, int, int, int]: ...
def nvfp4_sweep(
    src: Buffer,
    dtype: str,
    k: int,
    global_scale: float,
    weights: Buffer | None,
    out_codes: Buffer,
    out_scales: Buffer,
    /,
) -> tuple[int, int, int, int]: ...
def fp8_quantize_rows(
    src: Buffer, dtype: str, k: int, out_codes: Buffer, out_scales: Buffer, /
) -> tuple[int, int, int]: ...
def nvfp4_dequantize(
    codes: Buffer, scales: Buffer, k: int, global_scale: float, out: Buffer, out_dtype: str, /
) -> None: ...
def fp8_dequantize_rows(
    codes: Buffer, scales: Buffer, k: int, out: Buffer, out_dtype: str, /
) -> None: ...
def convert(src: Buffer, src_dtype: str, out: Buffer, out_dtype: str, /) -> int: ...
def add_low_rank(
    src: Buffer,
    dtype: str,
    k: int,
    a: Buffer,
    b: Buffer,
    scaling: float,
    out: Buffer,
    out_dtype: str,
    /,
) -> None: ...
def nvfp4_compare(
    src: Buffer,
    src_dtype: str,
    codes: Buffer,
    scales: Buffer,
    k: int,
    global_scale: float,
    swept: bool = False,
    /,
) -> tuple[float, float, float, int, int]: ...
def fp8_compare(
    src: Buffer, src_dtype: str, codes: Buffer, scales: Buffer, k: int, /
) -> tuple[float, float, float, int, int]: ...
def fp8_quantize_groups(
    src: Buffer, dtype: str, k: int, mx: bool, out_codes: Buffer, out_scales: Buffer, /
) -> tuple[int, int, int]: ...
def fp8_dequantize_groups(
    codes: Buffer, scales: Buffer, k: int, mx: bool, out: Buffer, out_dtype: str, /
) -> None: ...
def fp8_compare_groups(
    src: Buffer, src_dtype: str, codes: Buffer, scales: Buffer, k: int, mx: bool, exact: bool, /
) -> tuple[float, float, float, int, int]: ...
def equal(a: Buffer, b: Buffer, /) -> int: ...
def scan_e4m3_scales(scales: Buffer, /) -> tuple[int, int, int, int]: ...
def use_level(level: int, /) -> int: ...
