"""FP8 by `--gemm cutlass` against the exact emulation: each product in a forward pass, then logits.

Stated errors of a product, relative to FP64: 1.7e-3 with slow sums, 2.2e-3 to 3.9e-3 with fast
ones; most of the first is the rounding to BF16, which both sides share.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from beamq import quantize
from beamq.model.context import PassContext, SequenceLayout, position_table
from beamq.model.gemm.backend import DenseWeight, Gemm, Groups, LinearWeight
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import decoder_layer
from beamq.model.logits import logits
from benchmarks.random_layer import REAL, random_layer

BOUNDS = {"cutlass": 2e-3, "cutlass+fast": 5e-3}
LENGTHS = (3, 150)


@pytest.fixture(autouse=True)
def hopper(cuda: torch.device) -> None:
    """The kernel is for sm_90 alone."""
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("torch's CUTLASS FP8 kernels are for sm_90")


class Witness(Gemm):
    """A `Gemm` that multiplies by another, and keeps how far each product is from the emulation."""

    def __init__(self, name: str) -> None:
        self._chosen, self._emulation = select_gemm(name), select_gemm("reference")
        self.errors: list[tuple[float, str]] = []

    def linear(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        y_TN = self._chosen.linear(x_TK, weight)
        return self._kept(y_TN, self._emulation.linear(x_TK, weight), weight)

    def grouped(self, x_TK: torch.Tensor, weight: LinearWeight, groups: Groups) -> torch.Tensor:
        y_SN = self._chosen.grouped(x_TK, weight, groups)
        return self._kept(y_SN, self._emulation.grouped(x_TK, weight, groups), weight)

    def _kept(self, y: torch.Tensor, emulated: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        if not isinstance(weight, DenseWeight):
            apart = (y.double() - emulated.double()).norm() / emulated.double().norm()
            self.errors.append((float(apart), f"{list(y.shape)} by {list(weight.codes.shape)}"))
        return y


@pytest.fixture(scope="module")
def nano_fp8(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _converted(beam_nano, tmp_path_factory.mktemp("nano") / "fp8")


@pytest.fixture(scope="module")
def mini_fp8(beam_mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _converted(beam_mini, tmp_path_factory.mktemp("mini") / "fp8")


def _converted(source: Path, output: Path) -> Path:
    quantize(source, output, recipe="fp8")
    return output


@pytest.mark.parametrize("model", ["nano_fp8", "mini_fp8"])
def test_products_and_logits_of_a_model(
    cuda: torch.device, request: pytest.FixtureRequest, model: str
) -> None:
    checkpoint: Path = request.getfixturevalue(model)
    torch.manual_seed(0)
    ids = torch.randint(0, 2048, LENGTHS)
    exact = logits(checkpoint, ids, dtype=torch.float32)
    emulated = logits(checkpoint, ids, device=cuda, gemm="reference").cpu()
    noise = float((emulated - exact).abs().mean())
    for gemm, bound in BOUNDS.items():
        witness = Witness(gemm)
        logits(checkpoint, ids, device=cuda, gemm=witness)
        assert len(witness.errors) > 16, "the model's linears are not FP8"
        worst = max(witness.errors)
        assert worst[0] < bound, worst
        # Beside exact activations, as far off as BF16 and its effect on quantizers make any.
        got = logits(checkpoint, ids, device=cuda, gemm=gemm).cpu()
        away = [float((got - other).abs().mean()) / noise for other in (exact, emulated)]
        print(f"{model} {gemm}: worst product {worst[0]:.1e}, logits {away} of BF16's noise")
        assert away[0] < 1.15
        assert away[1] < 1.5


@pytest.mark.parametrize(("kind", "mlp"), [("sliding", "sparse"), ("full", "dense")])
def test_products_of_a_real_width_layer(cuda: torch.device, kind: str, mlp: str) -> None:
    weights = random_layer(REAL, kind, mlp, "fp8", cuda)
    layout, table = SequenceLayout(lengths=(640, 384)), position_table(REAL, 640, cuda)
    torch.manual_seed(1)
    h_TK = torch.randn(1024, REAL.hidden_size, device=cuda).bfloat16()

    def run(gemm: Gemm) -> torch.Tensor:
        with torch.inference_mode():
            context = PassContext(config=REAL, table=table, gemm=gemm)
            return decoder_layer(h_TK, weights, layout, context).double()

    emulated, h = run(select_gemm("reference")), h_TK.double()
    # What the layer adds: the stream is an average, so h stays in it with some factor.
    added = emulated - h * ((h * emulated).sum() / h.square().sum())
    for gemm, bound in BOUNDS.items():
        witness = Witness(gemm)
        run(witness)
        assert len(witness.errors) == 4
        worst = max(witness.errors)
        assert worst[0] < bound, worst
        away = float(((run(select_gemm(gemm)) - emulated).norm(dim=1) / added.norm(dim=1)).median())
        print(f"{kind} {mlp} {gemm}: worst product {worst[0]:.1e}, median token {away:.1e}")
        assert away < 6e-2
