"""Divergence and its standard errors against plain definitions in NumPy, and at the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamq.eval.compare.metrics import (
    Divergence,
    Estimate,
    TokenScores,
    layer_error,
    mean,
    quantiles,
    rms,
    root_of_ratio,
    score_base,
)

TOKENS, VOCAB = 60, 37
Floats = NDArray[np.float64]


def scored(base: torch.Tensor, other: torch.Tensor, following: torch.Tensor) -> Divergence:
    """Two chunks, as a run would pass them."""
    scores = TokenScores()
    for some in (slice(0, 23), slice(23, None)):
        scores.add(score_base(base[some], following[some]), other[some])
    return scores.result()


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    base = 4 * torch.randn(TOKENS, VOCAB, generator=generator)
    other = base + 0.3 * torch.randn(TOKENS, VOCAB, generator=generator)
    following = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    following[[19, 39, 59]] = -1
    return base, other, following


def log_softmax(x: torch.Tensor) -> Floats:
    values = x.double().numpy()
    shifted = values - values.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def test_every_figure_is_its_definition(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    base, other, following = logits
    found = scored(base, other, following)
    p, q = log_softmax(base), log_softmax(other)
    kld = (np.exp(p) * (p - q)).sum(1)
    rows = np.flatnonzero(following.numpy() >= 0)
    columns = following.numpy()[rows]
    true_p, true_q = p[rows, columns], q[rows, columns]
    change = np.exp(true_q) - np.exp(true_p)
    top = [set(np.argsort(-x, axis=1)[:, :5][n]) for n in range(TOKENS) for x in (p, q)]
    overlap = np.array([len(top[2 * n] & top[2 * n + 1]) / 5 for n in range(TOKENS)])
    expected = {
        "mean_kld": kld.mean(),
        "median_kld": np.median(kld),
        "kld_90": np.quantile(kld, 0.9),
        "kld_99": np.quantile(kld, 0.99),
        "kld_999": np.quantile(kld, 0.999),
        "max_kld": kld.max(),
        "ppl_base": math.exp(-true_p.mean()),
        "ppl": math.exp(-true_q.mean()),
        "ln_ppl_ratio": (true_p - true_q).mean(),
        "mean_delta_p": change.mean(),
        "rms_delta_p": math.sqrt((change**2).mean()),
        "same_top": (p.argmax(1) == q.argmax(1)).mean(),
        "top5_overlap": overlap.mean(),
    }
    for name, value in expected.items():
        assert getattr(found, name).value == pytest.approx(value, rel=1e-12), name
    assert (found.tokens, found.predicted, found.not_finite) == (TOKENS, TOKENS - 3, 0)
    # Standard errors are those of the three rows' means.
    spread = kld.reshape(3, 20).mean(1).std(ddof=1) / math.sqrt(3)
    assert found.mean_kld.standard_error == pytest.approx(spread)
    ratios = (true_p - true_q).reshape(3, 19).mean(1)
    assert found.ln_ppl_ratio.standard_error == pytest.approx(ratios.std(ddof=1) / math.sqrt(3))
    logs = true_q.reshape(3, 19).mean(1)
    assert found.ppl.standard_error == pytest.approx(
        found.ppl.value * logs.std(ddof=1) / math.sqrt(3)
    )
    counts = found.kld_histogram.counts
    assert sum(counts) + found.kld_histogram.below + found.kld_histogram.above == TOKENS
    place = int((math.log10(kld[0]) - found.kld_histogram.low) / found.kld_histogram.step)
    assert counts[place] > 0


def test_equal_logits_give_exactly_nothing(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    base, _, following = logits
    found = scored(base, base.clone(), following)
    assert found.exact
    for name in ("mean_kld", "max_kld", "ln_ppl_ratio", "mean_delta_p", "rms_delta_p"):
        assert getattr(found, name).value == 0.0, name
    assert found.same_top.value == found.top5_overlap.value == 1.0
    assert found.kld_histogram.below == TOKENS


def test_nearly_equal_logits_are_not_rounding_errors() -> None:
    """A KL of 1e-13, far below what FP32 logarithms can tell, and never below zero."""
    base = torch.randn(200, 4096, generator=torch.Generator().manual_seed(1))
    other = base.clone()
    other[:, 7] += 2.0**-18
    step = other[:, 7].double() - base[:, 7].double()
    p = base.double().softmax(-1)[:, 7]
    expected = (0.5 * p * (1 - p) * step**2).mean().item()
    found = scored(base, other, torch.zeros(200, dtype=torch.long))
    assert found.mean_kld.value == pytest.approx(expected, rel=0.02)
    assert found.mean_kld.value < 1e-13


def test_a_broken_model_is_counted_not_averaged_away(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    base, other, following = logits
    other = other.clone()
    other[4] = float("nan")
    found = scored(base, other, following)
    assert found.not_finite == 1
    assert math.isnan(found.mean_kld.value)
    assert math.isnan(found.kld_99.value)
    assert not found.exact


def test_a_vocabulary_smaller_than_five() -> None:
    base = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    found = scored(base, base, torch.tensor([1, -1]))
    assert found.top5_overlap.value == 1.0
    assert found.predicted == 1
    assert found.ppl.standard_error is None  # of one row


# --- standard errors ------------------------------------------------------------------------


def resampled(draws: int, function: object, size: int = 4000) -> float:
    """Spread of a figure over many samples: what a standard error estimates."""
    rng = np.random.default_rng(3)
    values = [function(rng.gamma(0.7, 1.0, size)) for _ in range(draws)]  # type: ignore[operator]
    return float(np.std(values))


@pytest.mark.parametrize(
    "figure",
    [
        mean,
        rms,
        lambda x: quantiles(x, (0.5,))[0],
        lambda x: quantiles(x, (0.9,))[0],
        lambda x: quantiles(x, (0.99,))[0],
        lambda x: root_of_ratio(x * x, x + 0.5),
    ],
    ids=["mean", "rms", "median", "90%", "99%", "ratio"],
)
def test_standard_errors_are_the_spread_over_samples(figure: object) -> None:
    def value(x: Floats) -> float:
        found: Estimate = figure(x)  # type: ignore[operator]
        return found.value

    rng = np.random.default_rng(4)
    told = np.mean(
        [figure(rng.gamma(0.7, 1.0, 4000)).standard_error for _ in range(20)]  # type: ignore[operator]
    )
    assert told == pytest.approx(resampled(300, value), rel=0.2)


def test_tokens_of_a_row_are_not_taken_for_independent() -> None:
    """Rows that differ more than their tokens do: the spread over samples, which is 5 times what
    independent tokens would have."""
    rng = np.random.default_rng(7)

    def sample() -> Floats:
        return rng.gamma(0.7, 1.0, (50, 1)) + rng.gamma(0.7, 1.0, (50, 100)) / 2

    samples = [sample() for _ in range(400)]
    for figure in (mean, rms, lambda x: quantiles(x, (0.9,))[0]):
        spread = np.std([figure(x).value for x in samples])
        said = np.mean([figure(x).standard_error for x in samples])
        assert said == pytest.approx(spread, rel=0.25)
        independent = np.mean([figure(x.flatten()).standard_error for x in samples])
        assert said > 2.5 * independent


def test_the_largest_value_has_no_standard_error() -> None:
    largest = quantiles(np.arange(10.0), (1.0,))[0]
    assert (largest.value, largest.standard_error) == (9.0, None)
    assert quantiles(np.array([2.0]), (0.5,))[0] == Estimate(value=2.0)
    assert math.isnan(quantiles(np.array([]), (0.5,))[0].value)
    assert math.isnan(mean(np.array([])).value)


@pytest.mark.parametrize("place", [0, 5, 9])
def test_a_list_with_a_nan_has_no_quantiles(place: int) -> None:
    """Sorting puts NaN last, so the lower quantiles would be figures of the other values."""
    values = np.arange(10.0)
    values[place] = math.nan
    for found in quantiles(values, (0.5, 0.9, 1.0)):
        assert math.isnan(found.value)
        assert found.standard_error is None


# --- layers ---------------------------------------------------------------------------------


def test_noise_powers_add_up_over_layers() -> None:
    generator = torch.Generator().manual_seed(2)
    h = torch.randn(50, 16, generator=generator)
    noise = [0.1 * torch.randn(50, 16, generator=generator) for _ in range(2)]
    errors = []
    for layer, other in enumerate((h + noise[0], h + noise[0] + noise[1])):
        states = [(h[rows], other[rows]) for rows in (slice(0, 30), slice(30, 50))]
        before = errors[-1].relative_error.value ** 2 if errors else 0.0
        errors.append(layer_error(layer, states, before, 10))
    last = (noise[0] + noise[1]).norm() / h.norm()
    assert errors[1].relative_error.value == pytest.approx(last.item(), rel=1e-5)
    assert errors[1].sqnr_db == pytest.approx(-20 * math.log10(last.item()), rel=1e-5)
    assert sum(e.added for e in errors) == pytest.approx(last.item() ** 2, rel=1e-5)


def test_router_agreement_ignores_order() -> None:
    base = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])]
    other = [torch.tensor([[2, 1], [3, 9]]), torch.tensor([[7, 8]])]
    states = [(torch.ones(3, 4), torch.ones(3, 4))]
    found = layer_error(3, states, 0.0, 3, base, other)
    assert found.same_experts is not None
    assert found.expert_overlap is not None
    assert found.same_experts.value == pytest.approx(1 / 3)
    assert found.expert_overlap.value == pytest.approx(0.5)
    dense = layer_error(0, states, 0.0, 3)
    assert (dense.same_experts, dense.expert_overlap) == (None, None)
