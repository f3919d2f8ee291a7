"""`logits`: token ids through a checkpoint of any format, streamed a layer at a time.

In: a checkpoint and token ids [B, T], padded or not. Out: FP32 logits [B, T, V].

The one idea: padding is removed before anything is computed and put back at the end, as zeros. Rows
are packed into batches of a bounded number of tokens, which bounds activations.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Sequence
from pathlib import Path

import torch
from numpy import int64
from numpy.typing import NDArray

from beamq.beam.config import BeamConfig
from beamq.devices import check_device_name, choose_device
from beamq.errors import UsageError
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.model.context import Observer, SequenceLayout
from beamq.model.forward import Batch, LayerPass
from beamq.model.gemm.backend import Gemm
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import head_logits
from beamq.model.layer_stream import LayerStream, experts_per_slice
from beamq.model.loader import LayerLoader
from beamq.options import Flag, takes
from beamq.ranks import Ranks

BATCH_TOKENS = 16_384
ACTIVATIONS = Flag("", choices=("bfloat16", "float32", "float16", "float64"))


def embed(loader: LayerLoader, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Hidden states [T, K] on the loader's device for each vector of token ids.

    Raises `UsageError` for an id outside the vocabulary.
    """
    vocab = loader.config.vocab_size
    for vector in ids:
        outside = vector[(vector < 0) | (vector >= vocab)]
        if outside.numel():
            raise UsageError(
                f"token id {int(outside[0])} is outside the vocabulary (0 to {vocab - 1}); was"
                " another model's tokenizer used?"
            )
    table = loader.embedding()
    return [table[vector.cpu()].to(loader.device) for vector in ids]


@takes(
    dtype=ACTIVATIONS,
    device=Flag("", check=check_device_name),
    gemm=Flag("", check=select_gemm),
    max_device_memory=Flag("", size=True),
)
def logits(
    checkpoint: Checkpoint | str | Path,
    input_ids: torch.Tensor | Sequence[Sequence[int]],
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str = "cpu",
    gemm: Gemm | str = "reference",
    attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
    observers: Sequence[Observer] = (),
    max_device_memory: int | None = None,
) -> torch.Tensor:
    """FP32 logits [B, T, V] of a BF16, FP8 or NVFP4 checkpoint, streamed layer by layer.

    `input_ids` is [B, T]; `attention_mask` [B, T] marks padding on either side with 0. Positions
    count from each row's first real token; logits at padding are 0. `dtype` is that of activations
    and unquantized weights, `gemm` a back end (see `model.gemm.select`), `device` where it runs
    ("auto": a GPU where there is one); `observers` see the inputs of linears. Memory for weights is
    two layers, or two slices of a layer's experts if `max_device_memory` (bytes) asks for that.
    Raises `UsageError` for ids or a mask of another form, `DeviceError`, and what reading the
    checkpoint raises.
    """
    where = choose_device(str(device), Ranks())
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    back_end = select_gemm(gemm) if isinstance(gemm, str) else gemm
    ids_BT = token_rows(input_ids)
    mask_BT = _mask(attention_mask, ids_BT)
    with contextlib.ExitStack() as stack:
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = stack.enter_context(open_checkpoint(checkpoint))
        config = BeamConfig.from_dict(checkpoint.config)
        loader = LayerLoader(checkpoint, config, dtype=dtype, device=where)
        stack.callback(loader.close)
        groups = _row_groups(mask_BT)
        layouts = [SequenceLayout.from_mask(mask_BT[rows]) for rows in groups]
        ids = [ids_BT[rows][mask_BT[rows]] for rows in groups]
        states = embed(loader, ids)
        batches = [Batch(h_TK=h, layout=layout) for h, layout in zip(states, layouts, strict=True)]
        del states
        share = None
        if max_device_memory is not None:
            most = max((batch.layout.tokens for batch in batches), default=0)
            share = experts_per_slice(checkpoint, config, dtype, max_device_memory, most)
        stream = LayerStream(loader, slice_experts=share)
        LayerPass(stream, batches, gemm=back_end, observers=observers).run()
        head = loader.head()
        shape = (*ids_BT.shape, config.vocab_size)
        out = torch.zeros(shape, dtype=torch.float32, device=where)
        with torch.inference_mode():
            for rows, batch in zip(groups, batches, strict=True):
                kept = mask_BT[rows].to(where)
                out[rows][kept] = head_logits(batch.h_TK.to(where), head, config)
        checkpoint.check_unchanged()
        return out


def token_rows(input_ids: torch.Tensor | NDArray[int64] | Sequence[Sequence[int]]) -> torch.Tensor:
    """Token ids [B, T], int64, on the CPU. Raises `UsageError` for anything else."""
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(
            f"input_ids: {_shown(input_ids)}, expected token ids [B, T]: a tensor, or rows of"
            " integers, all of one length"
        ) from None
    shape = list(ids.shape)
    if ids.dim() != 2:
        hint = "; one sequence is a batch of one, input_ids[None]" if ids.dim() == 1 else ""
        raise UsageError(f"input_ids: shape {shape}, expected [B, T]{hint}")
    if not ids.numel():
        raise UsageError(f"input_ids: shape {shape}, there is no token in it")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise UsageError(f"input_ids: {str(ids.dtype).removeprefix('torch.')}, expected integers")
    return ids.cpu().long()


def _shown(value: object) -> str:
    """What was given in the place of a tensor: a few entries of a list, a type's name."""
    short = isinstance(value, (str, list, tuple)) or value is None
    return reprlib.repr(value) if short else type(value).__name__


def _mask(
    attention_mask: torch.Tensor | Sequence[Sequence[int]] | None, ids_BT: torch.Tensor
) -> torch.Tensor:
    """Which tokens are real, bool [B, T], on the CPU. Raises `UsageError`."""
    if attention_mask is None:
        return torch.ones_like(ids_BT, dtype=torch.bool)
    try:
        mask = torch.as_tensor(attention_mask).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(
            f"attention_mask: {_shown(attention_mask)}, expected zeros and ones [B, T] in rows of"
            " one length"
        ) from None
    if mask.shape != ids_BT.shape:
        raise UsageError(
            f"attention_mask: shape {list(mask.shape)}, expected that of input_ids,"
            f" {list(ids_BT.shape)}"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise UsageError("attention_mask: expected 1 for a token and 0 for padding, nothing else")
    if not mask.any():
        raise UsageError("attention_mask: all of it is padding; there is no token to run")
    return mask.bool()


def _row_groups(mask_BT: torch.Tensor) -> list[slice]:
    """Rows in groups of at most `BATCH_TOKENS` real tokens, at least one row each."""
    groups: list[slice] = []
    start, tokens = 0, 0
    for row, count in enumerate(mask_BT.sum(1).tolist()):
        if row > start and tokens + count > BATCH_TOKENS:
            groups.append(slice(start, row))
            start, tokens = row, 0
        tokens += count
    groups.append(slice(start, mask_BT.shape[0]))
    return groups
