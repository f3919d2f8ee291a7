"""Where a calibration runs and what it needs there: the device, batches, memory.

In: headers, the number of tokens, a limit. Out: a `DevicePlan` whose figures are upper bounds of
what tensors take, known before any work.

On the device: two units of weights (one in use, one read ahead), one batch's activations, and the
hidden states of all samples as far as they fit. Whole layers come first, then states; where not
even whole layers fit, their experts come in slices and all states wait on the host. On a CPU
device and host are one, and the limit is on weights and activations.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from beamq.calib.expert_rounding import rounding_nbytes
from beamq.calib.options import CalibrationOptions
from beamq.checkpoint import Checkpoint
from beamq.config import BeamConfig
from beamq.errors import DeviceError
from beamq.model.exchange import own_experts
from beamq.model.logits import usable_device
from beamq.model.memory import activation_bytes, experts_per_slice, layer_bytes
from beamq.ranks import Ranks

BATCH_TOKENS = {"cuda": 16_384, "cpu": 4_096}
FREE_SHARE = 0.9  # of a GPU's free memory, where no limit was given
_UNITS = 2  # of weights: one in use, one read ahead
_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Experts to a slice (None: whole layers) and bytes of states on the device (None: all).

    `device_nbytes` is what a GPU needs, 0 on a CPU; `host_nbytes` what the host does.
    """

    slice_experts: int | None
    resident_nbytes: int | None
    device_nbytes: int
    host_nbytes: int


def choose_device(name: str, ranks: Ranks) -> torch.device:
    """The device of this process; "auto" and "cuda" are one GPU a rank.

    Raises `UsageError` for another name, `DeviceError` where there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = usable_device(name)
    if device.type == "cuda" and ":" not in name:
        local = int(os.environ.get("LOCAL_RANK", 0)) if ranks.world > 1 else 0
        if local >= torch.cuda.device_count():
            raise DeviceError(
                f"rank {ranks.rank} has no GPU of its own: {torch.cuda.device_count()} are here;"
                " start one process a GPU"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)  # NCCL uses the current one
    return device


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
    visited: bool = False,
    taken_nbytes: int = 0,
) -> DevicePlan:
    """The plan of one process, beside `taken_nbytes` that others will take of a GPU.

    Raises `MemoryBudgetError` if one expert at a time is too much.
    """
    config = BeamConfig.from_dict(checkpoint.config)
    budget = options.max_device_memory
    if budget is None and device.type == "cuda":
        budget = int(FREE_SHARE * torch.cuda.mem_get_info(device)[0]) - taken_nbytes
    batch = max(rows.stop - rows.start for rows in batch_rows(device, samples, length)) * length
    return fit(
        checkpoint,
        config,
        dtype=getattr(torch, options.dtype),
        batch_tokens=batch,
        tokens=samples * length,
        experts=len(own_experts(ranks, config)),
        budget=budget,
        on_gpu=device.type == "cuda",
        rounding_nbytes=rounding_nbytes(device.type, config) if visited else 0,
    )


def fit(
    checkpoint: Checkpoint,
    config: BeamConfig,
    *,
    dtype: torch.dtype,
    batch_tokens: int,
    tokens: int,
    experts: int,
    budget: int | None,
    on_gpu: bool = False,
    rounding_nbytes: int = 0,
) -> DevicePlan:
    """`plan_device` from its numbers; `experts` are this process's own, of each layer.

    `rounding_nbytes` is what rounding experts on the way takes of the device, if it is done.
    """
    sizes = layer_bytes(checkpoint, config, dtype)
    activations = activation_bytes(config, batch_tokens, dtype) + rounding_nbytes
    states = tokens * config.hidden_size * dtype.itemsize
    weights = _UNITS * (sizes.base + sizes.expert * experts)
    count, resident = None, None
    if budget is not None:
        rest = budget - weights - activations
        if rest < 0:
            found = experts_per_slice(
                checkpoint, config, dtype, budget - rounding_nbytes, batch_tokens
            )
            count, resident = min(found or experts, experts), 0
            weights = _UNITS * (sizes.base + sizes.expert * count)
    if count is not None or experts < config.num_experts or rounding_nbytes:
        states += tokens * config.hidden_size * _FP32  # sums between slices, or ranks
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
