"""Weights and factors for the low-rank kernel on GPUs, and its comparison with the CPU's bytes.

TRITON_INTERPRET=1 python -m tests.helpers.low_rank_cases    in Triton's interpreter, without a GPU
"""

from __future__ import annotations

import torch

from beamq.formats import numerics

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Stack, rows, columns, rank: smaller than a tile, a tile, beyond one; ranks odd, even, long.
SHAPES = [
    ((), 1, 1, 1), ((), 3, 40, 2), ((3,), 128, 128, 16), ((2,), 130, 136, 7), ((), 257, 384, 32),
    ((2,), 64, 128, 130), ((5,), 33, 31, 3),
]  # fmt: skip
SCALING = 0.3


def ordinary(
    lead: tuple[int, ...], n: int, k: int, r: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP32 w, a, b: Gaussians."""
    generator = torch.Generator().manual_seed(seed)
    w, a, b = (
        torch.randn(*lead, *shape, generator=generator) for shape in ((n, k), (r, k), (n, r))
    )
    return w, a * 0.2, b


def wild(
    lead: tuple[int, ...], n: int, k: int, r: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and columns of all sizes, subnormal to overflowing; zeros, infinities, NaN."""
    w, a, b = ordinary(lead, n, k, r, seed=1)
    generator = torch.Generator().manual_seed(2)
    w *= 2.0 ** torch.randint(-140, 120, (n, 1), generator=generator)
    b *= 2.0 ** torch.randint(-120, 70, (n, 1), generator=generator)
    a *= 2.0 ** torch.randint(-30, 60, (k,), generator=generator)
    a[..., 0, ::7], b[..., ::5, -1] = 0.0, -0.0
    w[..., ::11, -1], w[..., ::13, 0] = torch.inf, -torch.nan
    a[..., -1, 1 % k] = -torch.inf
    return w, a, b


def compare(
    device: str,
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """The kernel on `device`, and plain torch there, give the bytes of plain torch on the CPU."""
    from beamq.formats.kernels import triton_lowrank

    w, a, b = case[0].to(dtype), *case[1:]
    wanted = numerics.add_low_rank(w, a, b, SCALING, dtype)
    assert not torch.equal(wanted, w)
    on = [t.to(device) for t in (w, a, b)]
    twin = numerics.add_low_rank(*on, SCALING, dtype)
    triton_lowrank.add_low_rank(*on, SCALING)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for found in (on[0], twin):
        different = (found.cpu().view(bits) != wanted.view(bits)).nonzero()
        assert len(different) == 0, f"{len(different)} differ, first at {different[0].tolist()}"


def main() -> None:
    """What the interpreter can do: it doesn't fuse, and its cast to BF16 doesn't round.

    So products of factors with few bits, which are exact in FP32, and FP32 and F16 weights.
    """
    for shape in SHAPES:
        w, a, b = ordinary(*shape)
        for dtype in (torch.float16, torch.float32):
            compare("cpu", (w, a.bfloat16().float(), b.bfloat16().float()), dtype)
    print("equal")


if __name__ == "__main__":
    main()
