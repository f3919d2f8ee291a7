"""Weights in memory: quantize a stream of tensors, for trainers whose weights change every step.

In: (name, tensor) pairs under Beam's names, in any order, all on one device. Out: (name, tensor)
pairs on that device, byte for byte what `beamq quantize` writes for the same weights, recipe and
input scales.

The one idea: a tensor is converted when the last of those that share a scale with it has come, so
what waits is at most one group for each group that was begun. Packed experts [E, 2I, H] and
[E, H, I] are stacks whose matrices are groups of their own; nothing waits for them.

On a GPU everything is queued on the current stream, and the host never waits for it but once: what
the kernels counted (values that are not finite, blocks that would become zero) is read at the end,
after the last tensor. On a CPU each group is checked before any of it is given out.

Limits: a tensor that waits is not copied, so it must not change; one thread on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from beamq import devices
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import Role, TensorRole, classify
from beamq.convert.open_shards import MAX_UNDERFLOW_SHARE
from beamq.convert.profiles import PROFILES, Profile, profile_of, quantize_stack
from beamq.convert.resources import LEAST_CAPABILITY
from beamq.errors import (
    CalibrationError,
    DeviceError,
    RecipeError,
    TensorError,
    UsageError,
    printable,
)
from beamq.formats.kernels import cpu
from beamq.formats.numerics import NVFP4_BLOCK, TORCH_DTYPES, tensor_bytes
from beamq.formats.nvfp4 import QuantizedTensor
from beamq.io.checkpoint import FLOAT_SOURCES
from beamq.io.files import user_path
from beamq.io.safetensors_header import few
from beamq.options import Flag, read, takes, torch_as_it_comes
from beamq.plan import layout
from beamq.plan.plan import JobKind
from beamq.plan.recipe import Recipe
from beamq.plan.sources import packed_part
from beamq.plan.targets import ModelTargets, Target, beam_config, checked_recipe, targets_of

if TYPE_CHECKING:
    from beamq.calib.statistics import CalibrationStats

Named = tuple[str, torch.Tensor]
_DTYPES = {TORCH_DTYPES[name]: name for name in FLOAT_SOURCES}


@takes(profile=Flag("", choices=("beamq", *PROFILES)), partial=Flag("", choices=("error", "hold")))
def quantize_tensors(
    named: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
    recipe: Recipe | str | Path,
    config: BeamConfig | Mapping[str, Any] | str | Path,
    *,
    profile: str = "beamq",
    input_scales: CalibrationStats | Mapping[str, float] | str | Path | None = None,
    device: torch.device | str | None = None,
    partial: str = "error",
) -> TensorStream:
    """Quantize tensors in memory; an iterator of (name, tensor), on their device.

    `named` are tensors of a model under the names of transformers' checkpoints, all or some,
    experts one by one or packed; BF16, F16 or F32. `config` is the parsed config.json, its folder,
    or a `BeamConfig`. `profile` says whose bytes: "beamq", or one of `profiles.PROFILES`, for which
    the recipe says only which parts are quantized. `input_scales` are
    calibration statistics or their file, with the recipe's headroom, or a number for each linear
    by its name or by that of the stored tensor; without them each is 1.0. `device` is where the
    tensors must be (default: where the first one is). `partial` says what becomes of linears whose
    partners never came: an "error", or "hold": they are in `TensorStream.held`, to be given to the
    next call.

    Raises `UsageError`, `RecipeError`, `ConfigError`, `CalibrationError` and `DeviceError` before a
    tensor is taken, `TensorError` for one that does not fit; of its group nothing is given out. On
    a GPU values that are not finite are an error only after the last tensor: use the weights when
    the iterator has ended.
    """
    recipe, config = checked_recipe(recipe), beam_config(config)
    if recipe.expert_method is not None:
        raise RecipeError(
            f"recipe {recipe.name} rounds experts by activations ({recipe.expert_method}), which a"
            " stream of weights does not have; use a recipe without, such as nvfp4"
        )
    if not recipe.calibrated and input_scales is not None:
        raise UsageError(
            "input_scales: FP8 activations are scaled per token when served; leave them out"
        )
    if not isinstance(named, Iterable):
        raise UsageError(f"named is {printable(repr(named), 60)}, expected pairs (name, tensor)")
    model = targets_of(config, recipe)
    return TensorStream(
        named.items() if isinstance(named, Mapping) else named,
        model,
        recipe.scales,
        _input_scale(input_scales, config, recipe.headroom),
        None if device is None else torch.empty(0, device=devices.usable_device(device)).device,
        hold=partial == "hold",
        profile=profile_of(profile, recipe, model),
    )


# Input scales: a number for each linear, the same for those that an engine fuses.


def _input_scale(given: Any, config: BeamConfig, headroom: int) -> Callable[[str], float]:
    """The input scale of a linear by its module. The call raises `CalibrationError`."""
    from beamq.calib.input_scales import constant_scales, input_scales
    from beamq.calib.statistics import CalibrationStats, load_stats

    if not isinstance(given, Mapping):
        given = read(given, "input_scales", "CalibrationStats | Mapping | str | Path | None")
    if isinstance(given, (str, Path)):
        given = load_stats(user_path(given))
    if given is None or isinstance(given, CalibrationStats):
        scales = constant_scales() if given is None else input_scales(given, config, headroom)
        return lambda module: float(scales.scale(module))

    def of(module: str) -> float:
        value = given.get(f"{module}.input_scale", given.get(module))
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise CalibrationError(
                f"input_scales: that of {module} is on {value.device}; give numbers, or tensors on"
                " the CPU, as reading each of them would wait for the device"
            )
        try:
            scale = float(value)
        except (TypeError, ValueError, RuntimeError):
            scale = math.nan
        if not 2.0**-126 <= scale <= 2.0**126:
            found = "is missing" if value is None else f"is {printable(repr(value), 40)}"
            raise CalibrationError(
                f"input_scales: that of {module} {found}, expected a positive number"
            )
        return scale

    return of


# The kernels of a device: `formats.kernels.gpu`, or the same functions on the CPU.


class CpuKernels:
    """`nvfp4_groups` and `fp8_quantize` of `formats.kernels.gpu` for tensors on the CPU."""

    @staticmethod
    def nvfp4_groups(
        parts: Sequence[torch.Tensor], linears: int, scale_rule: str
    ) -> tuple[list[QuantizedTensor], torch.Tensor, torch.Tensor]:
        groups = parts[0].shape[0]
        scales = torch.empty(groups, linears, dtype=torch.float32, device="cpu")
        counts = torch.zeros(len(parts), groups, 4, dtype=torch.int32, device="cpu")
        quantized = [
            QuantizedTensor(
                codes=part.new_empty(*part.shape[:-1], part.shape[-1] // 2, dtype=torch.uint8),
                block_scale=part.new_empty(
                    *part.shape[:-1], part.shape[-1] // NVFP4_BLOCK, dtype=torch.float8_e4m3fn
                ),
                global_scale=scales[:, 0],
            )
            for part in parts
        ]
        for group in range(groups):
            peaks = [
                cpu.amax(tensor_bytes(part[group]), _DTYPES[part.dtype]).amax for part in parts
            ]
            scale = cpu.nvfp4_global_scale(max(peaks))
            scales[group] = scale
            for part, made, found in zip(parts, quantized, counts, strict=True):
                kinds = cpu.nvfp4_quantize(
                    tensor_bytes(part[group]), _DTYPES[part.dtype], part.shape[-1], scale,
                    tensor_bytes(made.codes[group]), tensor_bytes(made.block_scale[group]),
                    scale_rule=scale_rule,
                )  # fmt: skip
                found[group] = found.new_tensor(astuple(kinds))
        return quantized, scales, counts

    @staticmethod
    def fp8_quantize(
        rounding: str, w: torch.Tensor, *, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fmt, (n, k) = layout.WEIGHT_FORMATS[rounding], w.shape[1:]
        codes = w.new_empty(w.shape, dtype=torch.float8_e4m3fn)
        scale = w.new_empty(len(w), *fmt.scale_shape(n, k), dtype=TORCH_DTYPES[fmt.scale_dtype])
        for part, code, own in zip(w, codes, scale, strict=True):
            found = cpu.fp8_quantize(
                rounding,
                tensor_bytes(part),
                _DTYPES[w.dtype],
                k,
                tensor_bytes(code),
                tensor_bytes(own),
            )
            counts[0] += found.nonfinite
            counts[1] += found.zero_rows
        return codes, scale


def _kernels(device: torch.device) -> Any:
    """Raises `DeviceError` for a device that cannot convert."""
    if device.type == "cpu":
        return CpuKernels
    if (refused := devices.refusal(device, LEAST_CAPABILITY)) is not None:
        raise DeviceError(
            f"{device}: {refused}; move the tensors to the CPU, where the bytes are the same"
        )
    from beamq.formats.kernels import gpu  # Triton, only where there is a GPU

    return gpu


class TensorStream(Iterator[Named]):
    """What `quantize_tensors` returns: an iterator, and the tensors that still wait (`held`)."""

    def __init__(
        self,
        named: Iterable[Named],
        model: ModelTargets,
        scale_rule: str,
        input_scale: Callable[[str], float],
        device: torch.device | None,
        *,
        hold: bool,
        profile: Profile | None = None,
    ) -> None:
        self._model = model
        self._scale_rule = scale_rule
        self._input_scale = input_scale
        self._device = device
        self._kernels: Any = None if device is None else _kernels(device)
        self._hold = hold
        self._profile = profile
        self._seen: dict[str, str] = {}
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}
        self._found: list[tuple[list[Target], torch.Tensor]] = []  # on a GPU, to look at last
        self._outputs = self._run(named)

    def __next__(self) -> Named:
        return next(self._outputs)

    @property
    def held(self) -> list[Named]:
        """The tensors whose partners have not come, as they were given."""
        return [pair for waiting in self._waiting.values() for pair in waiting.items()]

    def _run(self, named: Iterable[Named]) -> Iterator[Named]:
        for pair in named:
            target, tensor = self._accept(pair)
            names = self._model.groups[target.group]
            waiting = self._waiting.setdefault(target.group, {})
            waiting[target.name] = tensor
            if len(waiting) == len(names):
                del self._waiting[target.group]
                targets = [self._model.by_name[name] for name in names]
                yield from self._convert(targets, [waiting[name] for name in names])
        self._finish()

    def _accept(self, pair: object) -> tuple[Target, torch.Tensor]:
        """Raises `TensorError` for a tensor that does not fit, `UsageError` for what is none."""
        name, tensor = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, None)
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"named holds {printable(repr(pair), 60)}, expected pairs (name, tensor)"
            )
        target = self._model.target(name)
        self._refuse_twice(target)
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.layout != torch.strided:
            raise TensorError(
                f"{name} is a {tensor.layout if plain else type(tensor).__name__}, expected a plain"
                " dense tensor; of a DTensor, its full_tensor()"
            )
        if tuple(tensor.shape) != target.shape:
            raise TensorError(
                f"{name}: shape {list(tensor.shape)}, but config.json calls for"
                f" {list(target.shape)}; gather the parts of a sharded tensor first"
            )
        if tensor.dtype not in _DTYPES:
            raise TensorError(f"{name}: dtype is {tensor.dtype}, expected BF16, F16 or F32")
        if self._device is None:
            self._device, self._kernels = tensor.device, _kernels(tensor.device)
        if tensor.device != self._device:
            raise TensorError(
                f"{name} is on {tensor.device}, expected {self._device} as the others; move it"
            )
        return target, tensor

    def _refuse_twice(self, target: Target) -> None:
        """Raise `TensorError` for a tensor that has come before, packed or not."""
        if target.role.role is Role.EXPERT:
            stack = f"{target.role.layer} {packed_part(target.role)}"
            first = self._seen.setdefault(stack, target.name)
            packed = target.role.packed or classify(first).packed
            if packed and first != target.name:
                raise TensorError(f"{target.name} and {first} hold the same experts; give one form")
        if target.name in self._seen:
            raise TensorError(f"{target.name} came twice in one stream; give each tensor once")
        self._seen[target.name] = target.name

    def _convert(self, targets: list[Target], tensors: list[torch.Tensor]) -> list[Named]:
        """All outputs of one group. On a CPU raises `TensorError` for what its values are."""
        device = tensors[0].device
        kinds = {JobKind.COPY: self._copy, JobKind.NVFP4: self._nvfp4}
        on_device = nullcontext() if device.type == "cpu" else torch.cuda.device(device)
        with torch_as_it_comes(), on_device:
            outputs, found = kinds.get(targets[0].kind, self._fp8)(targets, tensors)
        if self._kernels is not CpuKernels:
            self._found.append((targets, found))
        elif fault := _fault(targets, found.flatten().tolist(), tensors):
            raise TensorError(fault)
        return outputs

    def _copy(
        self, targets: list[Target], tensors: list[torch.Tensor]
    ) -> tuple[list[Named], torch.Tensor]:
        (target,), (tensor,) = targets, tensors
        dtype = TORCH_DTYPES[target.dtype]
        if tensor.dtype != dtype or not tensor.is_contiguous():
            tensor = tensor.detach().to(dtype).contiguous()
        ends = torch.stack(torch.aminmax(tensor.detach()))  # a NaN is both
        found = ends.isfinite().logical_not().sum(dtype=torch.int32)
        if target.role.packed is None:
            return [(target.name, tensor)], found
        return [(role.name, rows) for role, rows in _rows(target, tensor.detach())], found

    def _fp8(
        self, targets: list[Target], tensors: list[torch.Tensor]
    ) -> tuple[list[Named], torch.Tensor]:
        (target,), w = targets, _stack(targets[0], tensors[0])
        if self._profile is not None:
            pairs, found = quantize_stack(self._profile, w, len(target.linears[0]))
            rows = zip(*(_rows(target, each) for each in pairs), strict=True)
            return [
                (name, tensor.contiguous())
                for (role, code), (_, scale) in rows
                for name, tensor in zip(self._profile.names(role), (code, scale), strict=True)
            ], found
        roles = [role for linears in target.linears for role in linears]
        w = w.view(len(roles), -1, w.shape[-1])  # blocks of rows do not cross linears
        counts = torch.zeros(2, dtype=torch.int32, device=w.device)
        codes, scales = self._kernels.fp8_quantize(target.kind, w, counts=counts)
        outputs: list[Named] = []
        for role, code, scale in zip(roles, codes.unbind(), scales.unbind(), strict=True):
            outputs += _named(role, target.format, w.shape[-1], (code, scale))
        return outputs, counts

    def _nvfp4(
        self, targets: list[Target], tensors: list[torch.Tensor]
    ) -> tuple[list[Named], torch.Tensor]:
        parts = [_stack(target, tensor) for target, tensor in zip(targets, tensors, strict=True)]
        inputs = self._input_scales(targets, parts[0].device)
        quantized, scales, counts = self._kernels.nvfp4_groups(
            parts, inputs.shape[1], self._scale_rule
        )
        # Of several parts each is one matrix, and of a stack there is one part: so linears come in
        # the order of the tables.
        tables = zip(scales.view(-1).unbind(), inputs.view(-1).unbind(), strict=True)
        outputs: list[Named] = []
        for target, part, made in zip(targets, parts, quantized, strict=True):
            codes, blocks = _rows(target, made.codes), _rows(target, made.block_scale)
            for (role, code), (_, block) in zip(codes, blocks, strict=True):
                outputs += _named(role, target.format, part.shape[-1], (code, block, *next(tables)))
        return outputs, counts

    def _input_scales(self, targets: list[Target], device: torch.device) -> torch.Tensor:
        """FP32 [groups, linears]: the input scale of each, filled in without a copy from the host.

        Raises `CalibrationError`.
        """
        found = []
        for linears in zip(*(target.linears for target in targets), strict=True):
            modules = [role.module for roles in linears for role in roles]
            scales = sorted({self._input_scale(module) for module in modules})
            if len(scales) > 1:
                raise CalibrationError(
                    f"input_scales: those of {few(modules, 4)} are from {scales[0]} to"
                    f" {scales[-1]}; engines fuse these linears, so give them one"
                )
            found += scales
        dtype, width = torch.float32, len(modules)
        runs = [
            torch.full((len(list(run)), width), scale, dtype=dtype, device=device)
            for scale, run in groupby(found)
        ]
        return torch.cat(runs) if runs[1:] else runs[0]

    def _finish(self) -> None:
        """Raise `TensorError` for what the kernels counted, and for partners that never came."""
        if self._found:
            numbers = torch.cat([found.flatten() for _, found in self._found]).tolist()  # waits
            faults, begin = [], 0
            for targets, found in self._found:
                faults.append(_fault(targets, numbers[begin : begin + found.numel()]))
                begin += found.numel()
            if named := [fault for fault in faults if fault]:
                more = f" (and {len(named) - 1} more such groups)" if named[1:] else ""
                raise TensorError(f"{named[0]}{more}; none of what was given out may be used")
        if self._waiting and not self._hold:
            group, waiting = next(iter(self._waiting.items()))
            missing = [name for name in self._model.groups[group] if name not in waiting]
            raise TensorError(
                f"the stream ended without {few(missing)}, with which {few(list(waiting))} shares a"
                f" scale ({len(self._waiting)} incomplete groups); give them in one stream, or with"
                ' partial="hold" in the next'
            )


def _stack(target: Target, tensor: torch.Tensor) -> torch.Tensor:
    """[G, n, K] as the kernels take it; a copy only of what is not contiguous or not aligned."""
    w = tensor.detach().contiguous()
    if w.data_ptr() % 16:
        w = w.clone()
    return w.view(len(target.linears), -1, w.shape[-1])


def _rows(target: Target, stack: torch.Tensor) -> Iterator[tuple[TensorRole, torch.Tensor]]:
    """Each linear of a stack [G, n, ...] and its rows, without a copy."""
    for roles, matrix in zip(target.linears, stack.unbind(), strict=True):
        yield from zip(roles, matrix.chunk(len(roles)), strict=True)


def _named(
    role: TensorRole, fmt: str, k: int, outputs: tuple[torch.Tensor, ...]
) -> Iterator[Named]:
    """The outputs of a linear under the names that a checkpoint has."""
    names = layout.quantized_tensors(role.module, fmt, outputs[0].shape[0], k)
    pairs = zip(names, outputs, strict=True)
    return ((name, output.view(shape)) for (name, _, shape), output in pairs)


def _fault(
    targets: list[Target], counts: list[int], tensors: Sequence[torch.Tensor] = ()
) -> str | None:
    """What is wrong with a group's values, from its counts; `tensors` tell the place."""
    groups = len(targets[0].linears)
    nvfp4 = targets[0].kind is JobKind.NVFP4
    rows = [counts[at : at + 4] for at in range(0, len(counts), 4)] if nvfp4 else []
    for index, target in enumerate(targets):
        own = [row[3] for row in rows[index * groups : (index + 1) * groups]] or counts[:1]
        if any(own):
            where = f" (expert {next(at for at, n in enumerate(own) if n)})" if own[1:] else ""
            if tensors:
                copied = target.kind is JobKind.COPY
                seen = tensors[index].to(TORCH_DTYPES[target.dtype]) if copied else tensors[index]
                where = f" (first at {seen.isfinite().logical_not().nonzero()[0].tolist()})"
            return f"{target.name} holds NaN or infinity, or overflows BF16{where}"
    blocks = sum(math.prod(target.shape) for target in targets) / groups / NVFP4_BLOCK
    for group in range(groups if nvfp4 else 0):
        lost = sum(row[1] for row in rows[group::groups])
        if lost > MAX_UNDERFLOW_SHARE * blocks:
            names = [role.module for target in targets for role in target.linears[group]]
            return (
                f"{few(names)}: {lost:,} of {blocks:,.0f} blocks would become zero, because the"
                " largest value is far above the others"
            )
    return None
