"""`logits`: token ids through a checkpoint of any format, streamed a layer at a time.

In: a checkpoint and token ids [B, T], padded or not. Out: FP32 logits [B, T, V].

The one idea: padding is taken out before anything is computed and put back at the end, as zeros.
Rows are packed into batches of a bounded number of tokens, so activations stay bounded too; what
grows with the request is only its hidden states and the logits themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from beamq.checkpoint import Checkpoint, open_checkpoint
from beamq.config import BeamConfig
from beamq.errors import DeviceError, UsageError
from beamq.model.attention import SequenceLayout
from beamq.model.beam import head_logits
from beamq.model.layer_stream import LayerStream
from beamq.model.linear import Gemm, gemm_backend
from beamq.model.load import LayerLoader
from beamq.model.memory import experts_per_slice
from beamq.model.observe import Observer
from beamq.model.run import Batch, run_layers

BATCH_TOKENS = 16_384


def embed(loader: LayerLoader, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Hidden states [T, K] on the loader's device for each vector of token ids.

    Raises `UsageError` for an id outside the vocabulary.
    """
    vocab = loader.config.vocab_size
    for vector in ids:
        if vector.numel() and not 0 <= int(vector.min()) <= int(vector.max()) < vocab:
            raise UsageError(
                f"token id {int(vector.max())} or {int(vector.min())} is outside the vocabulary"
                f" of {vocab}; was another model's tokenizer used?"
            )
    table = loader.embedding()
    return [table[vector.cpu()].to(loader.device) for vector in ids]


def logits(
    checkpoint: Checkpoint | str | Path,
    input_ids: torch.Tensor | Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    gemm: Gemm | str = "reference",
    attention_mask: torch.Tensor | None = None,
    observers: Sequence[Observer] = (),
    max_device_memory: int | None = None,
) -> torch.Tensor:
    """FP32 logits [B, T, V] of a BF16, FP8 or NVFP4 checkpoint, streamed layer by layer.

    `input_ids` is [B, T]; `attention_mask` [B, T] marks padding on either side with 0. Positions
    count from each row's first real token; logits at padding are 0. `dtype` is that of
    activations and unquantized weights. Memory for weights is two layers, or two slices of a
    layer's experts if `max_device_memory` (bytes) asks for that.
    """
    if not isinstance(checkpoint, Checkpoint):
        with open_checkpoint(checkpoint) as opened:
            return logits(
                opened,
                input_ids,
                dtype=dtype,
                device=device,
                gemm=gemm,
                attention_mask=attention_mask,
                observers=observers,
                max_device_memory=max_device_memory,
            )
    where = usable_device(device)
    back_end = gemm_backend(gemm) if isinstance(gemm, str) else gemm
    ids_BT = torch.as_tensor(input_ids).cpu()
    mask_BT = torch.ones_like(ids_BT) if attention_mask is None else attention_mask.cpu()
    if ids_BT.dim() != 2 or mask_BT.shape != ids_BT.shape:
        raise UsageError(
            f"input_ids {list(ids_BT.shape)} and attention_mask {list(mask_BT.shape)}: expected"
            " two of one shape [B, T]"
        )
    config = BeamConfig.from_dict(checkpoint.config)
    loader = LayerLoader(checkpoint, config, dtype=dtype, device=where)
    try:
        groups = _row_groups(mask_BT)
        layouts = [SequenceLayout.from_mask(mask_BT[rows]) for rows in groups]
        ids = [ids_BT[rows][mask_BT[rows].bool()] for rows in groups]
        states = embed(loader, ids)
        batches = [Batch(h_TK=h, layout=layout) for h, layout in zip(states, layouts, strict=True)]
        del states
        share = None
        if max_device_memory is not None:
            most = max((batch.layout.tokens for batch in batches), default=0)
            share = experts_per_slice(checkpoint, config, dtype, max_device_memory, most)
        stream = LayerStream(loader, slice_experts=share)
        run_layers(stream, batches, gemm=back_end, observers=observers)
        head = loader.head()
        out = torch.zeros(*ids_BT.shape, config.vocab_size, device=where)
        with torch.inference_mode():
            for rows, batch in zip(groups, batches, strict=True):
                kept = mask_BT[rows].bool().to(where)
                out[rows][kept] = head_logits(batch.h_TK.to(where), head, config)
        return out
    finally:
        loader.close()


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


def usable_device(device: torch.device | str) -> torch.device:
    """The device, if it is there. Raises `DeviceError`."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise DeviceError(f"device {str(device)[:40]!r}: expected cpu, cuda or cuda:N") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device {found}: no usable NVIDIA GPU is here; use --device cpu")
    return found
