"""FP8 codes and scales against ModelOpt's per-channel rule, and its error against llm-compressor's.

ModelOpt divides by an FP32 scale and casts; that is our rule. llm-compressor (its arithmetic is
compressed-tensors') computes the scale in the weight's dtype, BF16, which rounds it by up to 0.2%
and clips the largest value of a row or wastes range.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from modelopt.torch.export.quant_utils import to_quantized_weight
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
from safetensors import safe_open

from beamq.formats import fp8
from beamq.formats.kernels import cpu

NANO = Path(__file__).parents[2] / "examples" / "beam-nano" / "model.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def gaussian(seed: int, rows: int = 24, k: int = 72) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))


def ties() -> torch.Tensor:
    """Midpoints of neighbouring E4M3 magnitudes, both signs, in rows whose scale is exact."""
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (grid[1:] + grid[:-1]) / 2
    row = torch.cat((middle, -middle, torch.tensor([448.0, -0.0, 0.0, 1.7568])))
    return row * torch.tensor([[2.0**-8], [0.5], [1.0], [64.0]])


CASES = {
    "normal": gaussian(0) * 0.02,
    "ties": ties(),
    "-0.0 and zeros in rows": torch.where(gaussian(1) > 1, gaussian(1), -0.0),
    "subnormal elements": torch.cat((torch.ones(24, 1), gaussian(2) * 1e-42), dim=1),
    "tiny rows": gaussian(3) * torch.logspace(-33, -3, 24).unsqueeze(1),
    "huge": gaussian(4) * 1e4,
}


def check_kernel(w: torch.Tensor, dtype: str) -> None:
    codes, scale = fp8.quantize_rows(w)
    n, k = w.shape
    fast_codes, fast_scales = bytearray(n * k), bytearray(n * 4)
    cpu.fp8_quantize_rows(w.view(torch.uint8).numpy(), dtype, k, fast_codes, fast_scales)
    assert fast_codes == codes.view(torch.uint8).numpy().tobytes()
    assert fast_scales == scale.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_codes_and_scales_equal_modelopts(name: str, dtype: str) -> None:
    w = CASES[name].to(DTYPES[dtype])
    w = w[w.abs().amax(dim=1) > 0]  # F16 has no values this small; zero rows have their own test
    codes, scale = fp8.quantize_rows(w)
    theirs, their_scale = FP8QTensor.quantize(w.float(), axis=0)
    assert torch.equal(scale, their_scale)
    assert torch.equal(codes.view(torch.uint8), theirs._quantized_data.view(torch.uint8))
    exported = to_quantized_weight(w, scale.flatten(), "fp8_pc_pt")
    assert torch.equal(codes.view(torch.uint8), exported.view(torch.uint8))
    check_kernel(w, dtype)


def test_difference_zero_and_denormal_rows() -> None:
    """ModelOpt's scale of a zero row is zero (and its codes NaN); of a tiny row it is denormal."""
    w = torch.stack((torch.zeros(16), torch.full((16,), 1e-36), torch.ones(16)))
    codes, scale = fp8.quantize_rows(w)
    assert scale.flatten().tolist() == [torch.tensor(1.0) / 448, 2.0**-126, torch.tensor(1.0) / 448]
    assert not codes[0].view(torch.uint8).any()
    theirs, their_scale = FP8QTensor.quantize(w, axis=0)
    assert their_scale[0] == 0
    assert theirs._quantized_data[0].isnan().all()
    assert torch.equal(codes[2].float(), theirs._quantized_data[2].float())
    check_kernel(w, "F32")


def relative_error(w: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> float:
    decoded = codes.double() * scale.double()
    return float((decoded - w.double()).norm() / w.double().norm())


def llm_compressor(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8_DYNAMIC's weight path: min and max in the weight's dtype, scale from these."""
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    low, high = w.amin(dim=-1, keepdim=True), w.amax(dim=-1, keepdim=True)
    scale, zero_point = calculate_qparams(low, high, args)
    codes = quantize(w, scale, zero_point, args, dtype=torch.float8_e4m3fn)
    return codes, scale


def test_error_is_below_llm_compressors_on_every_tensor() -> None:
    ours, theirs = [], []
    with safe_open(NANO, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a mapping)
            w = tensors.get_tensor(name)
            if not name.endswith("_proj.weight"):
                continue
            codes, scale = llm_compressor(w)
            assert scale.dtype == torch.bfloat16
            ours.append(relative_error(w, *fp8.quantize_rows(w)))
            theirs.append(relative_error(w, codes, scale))
            assert ours[-1] <= theirs[-1], name
    assert len(ours) > 100
    assert sum(ours) < 0.997 * sum(theirs)
