"""What a calibration needs before its first layer: data, device, memory, the model's identity.

In: an open source and `CalibrationOptions`. Out: `CalibrationSetup`, with a `DevicePlan` whose
figures are upper bounds of what tensors take. Faults of the data, the device or the options end
the run here, before any work.

On the device: two units of weights (one in use, one read ahead), one batch's activations, and the
hidden states of all samples as far as they fit. Whole layers come first, then states. Where not
even whole layers fit, their experts come in slices and all states wait on the host. On a CPU,
device and host are one, and the limit applies to weights and activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from beamq.beam.config import BeamConfig
from beamq.calib.data import load_calibration_data
from beamq.calib.expert_rounding import rounding_nbytes
from beamq.calib.options import CalibrationOptions
from beamq.devices import choose_device
from beamq.io.checkpoint import Checkpoint
from beamq.model.expert_parallel import own_experts
from beamq.model.layer_stream import activation_bytes, experts_per_slice, layer_bytes
from beamq.ranks import Ranks
from beamq.version import __version__

BATCH_TOKENS = {"cuda": 16_384, "cpu": 4_096}
FREE_SHARE = 0.9  # of a GPU's free memory, where no limit was given
_UNITS = 2  # of weights: one in use, one read ahead
_FP32 = 4


class CalibrationSetup:
    """Data, device, plan and fingerprint of one calibration.

    Raises `CalibrationError`, `UsageError`, `DeviceError` or `MemoryBudgetError` when made.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: CalibrationOptions,
        ranks: Ranks,
        *,
        rounds_experts: bool = False,
        waiting_nbytes: int = 0,
        taken_nbytes: int = 0,
    ) -> None:
        """Memory that a conversion in the same pass adds: `rounds_experts` if it rounds experts
        by their inputs; `waiting_nbytes` on the host, for members that wait for their partners;
        `taken_nbytes` of the device, besides the forward pass."""

        self.checkpoint = checkpoint
        self.options = options
        self.ranks = ranks
        self.device: torch.device = choose_device(options.device, ranks)
        samples, length = options.size(self.device.type, checkpoint.config)
        self.data = load_calibration_data(
            options.data,
            checkpoint.root,
            samples=samples,
            sequence_length=length,
            seed=options.seed,
        )
        plan = plan_device(
            checkpoint,
            options,
            ranks,
            self.device,
            samples=self.data.samples,
            length=self.data.sequence_length,
            rounds_experts=rounds_experts,
            taken_nbytes=taken_nbytes,
        )
        self.plan = replace(plan, host_nbytes=plan.host_nbytes + waiting_nbytes)
        self.fingerprint = checkpoint.content_digest()

    @property
    def state_nbytes(self) -> int:
        """Bytes on disk of a run's state: two sets of hidden states, old and new."""
        itemsize = 4 if self.options.dtype == "float32" else 2
        return 2 * self.data.tokens * int(self.checkpoint.config["hidden_size"]) * itemsize

    def data_record(self) -> dict[str, Any]:
        """The record of the data and of the activations' dtype in the statistics."""
        return {**self.data.to_dict(), "activations": self.options.dtype}

    def identity(self) -> dict[str, str]:
        """What must be equal for a run to resume another; options have their flags as keys."""
        return {
            "version of beamq": __version__,
            "version of torch": torch.__version__,
            "source": self.checkpoint.fingerprint(),
            "device": self.device.type,
            "--samples": str(self.data.samples_asked),
            "--sequence-length": str(self.data.sequence_length),
            "--seed": str(self.data.seed),
            "--data": self.data.digest,
            **self.options.recorded(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Experts in a slice (None: whole layers) and bytes of states on the device (None: all).

    `device_nbytes` is what a GPU needs (0 on a CPU), `host_nbytes` what the host needs.
    """

    slice_experts: int | None
    resident_nbytes: int | None
    device_nbytes: int
    host_nbytes: int


def batch_rows(device: torch.device, samples: int, length: int) -> list[slice]:
    """Samples in batches of about `BATCH_TOKENS` tokens, at least one sample each."""
    rows = max(1, BATCH_TOKENS[device.type] // length)
    return [slice(first, min(first + rows, samples)) for first in range(0, samples, rows)]


def plan_device(
    checkpoint: Checkpoint,
    options: CalibrationOptions,
    ranks: Ranks,
    device: torch.device,
    *,
    samples: int,
    length: int,
    rounds_experts: bool = False,
    taken_nbytes: int = 0,
) -> DevicePlan:
    """The plan of one process, if others take `taken_nbytes` of its GPU.

    Raises `MemoryBudgetError` if one expert at a time is too much.
    """
    config = BeamConfig.from_dict(checkpoint.config)
    dtype: torch.dtype = getattr(torch, options.dtype)
    on_gpu = device.type == "cuda"
    budget = options.max_device_memory
    if budget is None and on_gpu:
        budget = int(FREE_SHARE * torch.cuda.mem_get_info(device)[0]) - taken_nbytes
    batch = max(rows.stop - rows.start for rows in batch_rows(device, samples, length)) * length
    rounding = rounding_nbytes(device.type, config) if rounds_experts else 0
    experts = len(own_experts(ranks, config))
    sizes = layer_bytes(checkpoint, config, dtype)
    activations = activation_bytes(config, batch, dtype) + rounding
    width = samples * length * config.hidden_size
    states = width * dtype.itemsize
    weights = _UNITS * (sizes.base + sizes.expert * experts)
    count, resident = None, None
    if budget is not None and weights + activations > budget:
        found = experts_per_slice(checkpoint, config, dtype, budget - rounding, batch)
        count, resident = min(found or experts, experts), 0
        weights = _UNITS * (sizes.base + sizes.expert * count)
    if count is not None or experts < config.num_experts or rounding:
        states += width * _FP32  # sums between slices, or ranks
    if budget is not None and count is None and states > budget - weights - activations:
        resident = budget - weights - activations
    on_device = states if resident is None else min(states, resident)
    embedding = config.vocab_size * config.hidden_size * dtype.itemsize + states
    here = weights // _UNITS + states - on_device if on_gpu else weights + activations + states
    return DevicePlan(
        slice_experts=count,
        resident_nbytes=resident,
        device_nbytes=weights + activations + on_device if on_gpu else 0,
        host_nbytes=max(here, embedding),
    )
