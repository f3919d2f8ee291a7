"""What recipes of equal bytes lose, on one text, as ratios to the first of them.

    python -m benchmarks.quality examples/beam-nano nvfp4-max nvfp4 nvfp4-gptq
    python -m benchmarks.quality PATH/beam-mini --rows 16 nvfp4-max nvfp4 nvfp4-gptq
    python -m benchmarks.quality examples/beam-nano nvfp4 nvfp4-gptq --text FILE --text FOLDER/

Protocol: calibrated on 16 rows of 512 tokens of the standard library's odd modules, judged on 48
rows of its even ones; exact emulation in FP32 (`--dtype float64`: linears and everything between
them in FP64, to see that no figure is rounding noise). For each recipe the mean KL(source ||
candidate) in nats per token, with exact activations and as served (W4A4), and the ratio to the
first recipe; its standard error is of the paired difference over rows. "activations only" is
exact weights under the first recipe's activations: no weights can do better than that.
`--text` judges by that text instead, given again by each in turn: the calibration stays the same.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from beamq.beam.config import BeamConfig
from beamq.calib.data import load_calibration_data
from beamq.convert.quantize import quantize
from beamq.eval.compare.side_by_side import ActivationsOnlyGemm, with_served_inputs
from beamq.io.checkpoint import open_checkpoint
from beamq.model.context import SequenceLayout
from beamq.model.forward import Batch, LayerPass
from beamq.model.layer import LayerWeights, head_logits
from beamq.model.layer_stream import LayerStream, in_turns
from beamq.model.loader import LayerLoader
from beamq.model.logits import embed, logits

LENGTH = 512
CHUNK_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Mean KL in nats, and the ratio to the reference with its paired standard error."""

    kl: float
    ratio: float
    error: float

    def __str__(self) -> str:
        return f"{self.kl:.5f} | {self.ratio:.3f} ± {self.error:.3f}"


def ratio(kl_R: torch.Tensor, reference_R: torch.Tensor) -> Ratio:
    """Of row means; the error is that of the mean of kl - ratio * reference."""
    value = float(kl_R.mean() / reference_R.mean())
    spread = (kl_R - value * reference_R).std() / math.sqrt(kl_R.numel())
    return Ratio(kl=float(kl_R.mean()), ratio=value, error=float(spread / reference_R.mean()))


def kl_of_rows(base_RTV: torch.Tensor, logits_RTV: torch.Tensor) -> torch.Tensor:
    """Mean KL of each row, FP64."""
    rows = []
    for base, other in zip(base_RTV.split(1), logits_RTV.split(1), strict=True):
        p, q = base.double().log_softmax(-1), other.double().log_softmax(-1)
        rows.append((p.exp() * (p - q)).sum(-1).mean())
    return torch.stack(rows)


def floor_logits(
    source: Path, candidate: Path, ids_RT: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The source's weights under the candidate's quantized activations."""
    with open_checkpoint(source) as exact, open_checkpoint(candidate) as served:
        config = BeamConfig.from_dict(exact.config)
        loaders = [
            LayerLoader(checkpoint, config, dtype=dtype, device=torch.device("cpu"))
            for checkpoint in (exact, served)
        ]
        batches = [
            Batch(h_TK=h_TK, layout=SequenceLayout.rectangle(*rows.shape))
            for rows in ids_RT.split(CHUNK_ROWS)
            for h_TK in embed(loaders[0], [rows.flatten()])
        ]
        streams = [LayerStream(loader) for loader in loaders]
        run = LayerPass(streams[0], batches, gemm=ActivationsOnlyGemm())
        base: LayerWeights | None = None
        for place, _, weights in in_turns(streams):
            if place == 0:
                base = weights
            elif base is not None:
                run.apply(with_served_inputs(base, weights))
        run.states.hand_over()
        head = loaders[0].head()
        with torch.inference_mode():
            parts = [head_logits(batch.h_TK, head, config) for batch in batches]
        for loader in loaders:
            loader.close()
    return torch.cat(parts).view(*ids_RT.shape, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One recipe on one text: `kind` is "weights only" or "W4A4", `kl_R` the KL of each row."""

    text: str
    recipe: str
    kind: str
    kl_R: torch.Tensor
    seconds: float = 0.0


def texts(arguments: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and rows of token ids to judge by."""
    for spec in arguments.text or (None,):
        data = load_calibration_data(
            () if spec is None else (spec,),
            arguments.source,
            samples=arguments.rows,
            sequence_length=LENGTH,
            seed=arguments.seed,
            split="evaluation",
        )
        name = "the standard library" if spec is None else Path(spec).name
        yield name, torch.from_numpy(data.input_ids)


def measured(arguments: argparse.Namespace, work: Path) -> Iterator[Measured]:
    """All recipes on all texts."""
    source, dtype = arguments.source, getattr(torch, arguments.dtype)
    judged = dict(texts(arguments))
    base = {name: logits(source, ids_RT, dtype=dtype) for name, ids_RT in judged.items()}
    for number, recipe in enumerate(arguments.recipes):
        output = work / f"{number}-{Path(recipe).stem}"
        begun = time.monotonic()
        quantize(
            source,
            output,
            recipe=recipe,
            data=arguments.data or (),
            samples=arguments.calibration,
            sequence_length=LENGTH,
            seed=arguments.seed,
        )
        seconds = time.monotonic() - begun
        for text, ids_RT in judged.items():
            for kind, gemm in (("weights only", "weights-only"), ("W4A4", "reference")):
                kl_R = kl_of_rows(base[text], logits(output, ids_RT, dtype=dtype, gemm=gemm))
                yield Measured(text=text, recipe=recipe, kind=kind, kl_R=kl_R, seconds=seconds)
            if number == 0:
                kl_R = kl_of_rows(base[text], floor_logits(source, output, ids_RT, dtype))
                yield Measured(text=text, recipe="activations only", kind="W4A4", kl_R=kl_R)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("recipes", nargs="+", help="built-in names or YAML files")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--calibration", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--data", action="append", help="calibrate on this text")
    parser.add_argument("--text", action="append", help="judge by this text")
    parser.add_argument("--json", type=Path, help="keep the KL of every row here")
    options = parser.parse_args(arguments)
    reference: dict[tuple[str, str], torch.Tensor] = {}
    table: dict[str, dict[str, dict[str, str]]] = {}
    kept: dict[str, dict[str, dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as work:
        for one in measured(options, Path(work)):
            reference.setdefault((one.text, one.kind), one.kl_R)
            cells = table.setdefault(one.text, {}).setdefault(one.recipe, {})
            cells["seconds"] = f"{one.seconds:.1f}"
            cells[one.kind] = str(ratio(one.kl_R, reference[one.text, one.kind]))
            lists = kept.setdefault(one.text, {}).setdefault(one.recipe, {})
            lists[one.kind] = one.kl_R.tolist()
    if options.json:
        options.json.write_text(json.dumps(kept))
    for text, recipes in table.items():
        print(f"{options.source.name}, {options.rows} rows of {LENGTH}, {options.dtype}, {text}\n")
        print("| recipe | weights only: KL | ratio | W4A4: KL | ratio | quantized in, s |")
        print("|---|---|---|---|---|---|")
        for recipe, cells in recipes.items():
            weights = cells.get("weights only", "- | -")
            print(f"| {recipe} | {weights} | {cells['W4A4']} | {cells['seconds']} |")


if __name__ == "__main__":
    main()
