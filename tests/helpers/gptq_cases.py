"""Blocks that are hard on the GPTQ kernel, and its comparison with the twin bit by bit.

TRITON_INTERPRET=1 python -m tests.helpers.gptq_cases      in Triton's interpreter, without a GPU
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from beamq.formats import gptq
from beamq.model.gemm.reference import nvfp4_operand

SHAPES = [(1, 1), (3, 130), (2, 257)]
GLOBAL_SCALES = [1.0, 0.02 / 2688, 2.0**-126, 1.7 * 2.0**-120, 300.0, 2.0**100]
WIDTHS = [16, 48, 160, 2560, 5120]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What `round_block` is given; views of larger tensors, as in use."""

    moved: torch.Tensor
    w: torch.Tensor
    unit: torch.Tensor
    pivot: torch.Tensor
    global_scale: torch.Tensor

    def rounded(self, kernel: object, device: str) -> tuple[torch.Tensor, ...]:
        """Codes, scale codes and errors, on the CPU."""
        experts, _, n = self.w.shape
        wide = torch.zeros(experts, 48, n, device=device)
        w = wide[:, 16:32]
        w.copy_(self.w)
        unit = torch.zeros(experts, 40, 40, device=device).mT  # as Cholesky leaves it on a GPU
        unit[:, 8:24, 8:24] = self.unit.to(device)
        codes = torch.zeros(experts, n, 24, dtype=torch.uint8, device=device)
        scales = torch.zeros(experts, n, 3, dtype=torch.uint8, device=device)
        kernel(  # type: ignore[operator]
            self.moved.to(device),
            w,
            unit[:, 8:24, 8:24],
            self.pivot.to(device),
            self.global_scale.to(device),
            codes[:, :, 8:16],
            scales[:, :, 1],
        )
        assert not codes[:, :, :8].any()
        assert not codes[:, :, 16:].any()
        assert not scales[:, :, ::2].any()
        assert not wide[:, :16].any()
        assert not wide[:, 32:].any()
        return codes.cpu(), scales.cpu(), w.cpu()


def block(experts: int, n: int, global_scale: float, seed: int = 0) -> Block:
    """Gaussians of many sizes, with blocks of zeros, of ties and beyond the grid."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    w = random(experts, 16, n) * global_scale * 2688 * 10.0 ** random(experts, 1, n).clamp(-2, 1)
    moved = w + 0.1 * random(experts, 16, n) * w.abs().amax(1, keepdim=True)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * global_scale
    for row, values in ((0, torch.zeros(16)), (5, ties), (7, -ties), (9, ties * 448)):
        if row < n:
            moved[:, :, row] = w[:, :, row] = values
    unit = torch.eye(16) + 0.4 * random(experts, 16, 16).triu(1)
    if seed % 2:
        unit = torch.eye(16).repeat(experts, 1, 1)  # so that ties stay ties
    pivot = 10.0 ** random(experts, 16)
    scale = torch.full((experts,), global_scale) * torch.linspace(1, 1.5, experts)
    return Block(moved=moved, w=w, unit=unit, pivot=pivot, global_scale=scale)


def compare_block(device: str, experts: int, n: int, global_scale: float, seed: int) -> None:
    """Codes, scales and errors of the kernel on `device` and of the twin on the CPU."""
    from beamq.formats.kernels import triton_gptq

    case = block(experts, n, global_scale, seed)
    wanted = case.rounded(gptq.round_block, "cpu")
    found = case.rounded(triton_gptq.round_block, device)
    for name, ours, theirs in zip(("codes", "scales", "errors"), found, wanted, strict=True):
        different = int((ours != theirs).sum())
        assert different == 0, f"{different} of {ours.numel()} {name} differ"


def tokens(width: int, global_scale: float, *, exact_scales: bool) -> torch.Tensor:
    """BF16 [40, width], some of them not finite. With `exact_scales` (of a power of two), blocks
    have scales that no cast has to round."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(40, width, generator=generator) * torch.logspace(-6, 3, 40).unsqueeze(1)
    if exact_scales:
        codes = torch.randint(1, 127, (40, width // 16), generator=generator, dtype=torch.uint8)
        x.uniform_(-1, 1, generator=generator)
        x.view(40, -1, 16)[:, :, 3] = 1.0
        scale = codes.view(torch.float8_e4m3fn).float()
        x = (x.view(40, -1, 16) * (6 * global_scale * scale).unsqueeze(-1)).flatten(1)
    x[3] = 0.0
    x[5, 7], x[6, -1], x[7, 0] = float("nan"), float("inf"), float("-inf")
    return x.bfloat16()


def compare_operand(device: str, width: int, scale: float, *, exact_scales: bool = False) -> None:
    """Served activations of the kernel on `device` and of plain torch."""
    from beamq.formats.kernels import triton_nvfp4

    x = tokens(width, scale, exact_scales=exact_scales)
    finite = x.isfinite().all(dim=1, keepdim=True)
    assert int(finite.sum()) == 37
    wanted = nvfp4_operand(torch.where(finite, x, 0), torch.tensor(scale))
    assert wanted.any()
    found = triton_nvfp4.nvfp4_operand(x.to(device), torch.tensor(scale, device=device))
    different = int((found.cpu().float() != wanted).sum())
    assert different == 0, f"{different} of {wanted.numel()} values differ"


def main() -> None:
    """What the interpreter is fast enough for, and can do: its E4M3 cast does not round right."""
    for place, scale in enumerate(GLOBAL_SCALES):
        compare_block("cpu", 1, 130 if place == 0 else 24, scale, place)
    for width in WIDTHS[:3]:
        compare_operand("cpu", width, 2.0**-9, exact_scales=True)
    print("equal")


if __name__ == "__main__":
    main()
