"""Attention against its definition: windows by blocks, positions, separation of samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from beamq.errors import UsageError
from beamq.model.attention import sliding_attention
from beamq.model.context import SequenceLayout


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int
) -> torch.Tensor:
    """The definition, with a T x T mask, in FP64."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    seen = (distance >= 0) & (distance < window)
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 70),
    window=st.integers(1, 20),
    kv=st.integers(1, 2),
    group=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_windows_by_blocks_equal_the_mask(
    batch: int, length: int, window: int, kv: int, group: int, seed: int
) -> None:
    torch.manual_seed(seed)
    q = torch.randn(batch, length, kv * group, 8)
    k, v = torch.randn(batch, length, kv, 8), torch.randn(batch, length, kv, 8)
    ours = sliding_attention(q, k, v, window)
    difference = (ours - masked_attention(q, k, v, window)).abs().max().item()
    assert difference < 1e-5, f"max difference {difference}"


def test_layouts() -> None:
    assert SequenceLayout.rectangle(2, 3).lengths == (3, 3)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    layout = SequenceLayout.from_mask(mask)
    assert layout.lengths == (2, 1, 3)
    assert (layout.tokens, layout.longest) == (6, 3)
    runs = list(SequenceLayout(lengths=(4, 4, 2, 4)).runs())
    assert runs == [(slice(0, 8), 2, 4), (slice(8, 10), 1, 2), (slice(10, 14), 1, 4)]


def test_layouts_refused() -> None:
    with pytest.raises(UsageError, match="row 1 has a hole"):
        SequenceLayout.from_mask(torch.tensor([[1, 1, 1], [1, 0, 1]]))
    with pytest.raises(UsageError, match="hold a zero"):
        SequenceLayout(lengths=(3, 0))
