"""Bars of `benchmarks.scale` for published steps with several kinds of parallelism: no scale knows
their source."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks import gpu_context, scale

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
#: Each step of this number is fitted to, by source and device; there are many of them.
_EACH = {"mpt": {"h100-sxm": 2, "a100-sxm": 12, "a100-sxm-40gb": 12}, "vtrain": {"a100-sxm": 12}}


def list_some_steps() -> list[Any]:
    """Some of the fitted steps of each source."""
    groups = dict[tuple[str, str], list[Any]]()
    for row in gpu_context.read_rows():
        groups.setdefault((row["source"], row["device"]), []).append(row)
    rows = list[Any]()
    for (source, device), members in groups.items():
        if source in gpu_context.FITTED:
            rows += members[:: _EACH.get(source, {}).get(device, 1)]
    return [step for step in gpu_context.list_steps(rows) if gpu_context.is_fitted(step)]


class Priced(NamedTuple):
    """The rows of a source beside their predictions."""

    rows: Sequence[scale.Row]
    figures: Sequence[dict[str, float]]


def forget_platforms() -> None:
    """Forget scales and platforms that were made of other steps."""
    scale._fit_scales.cache_clear()
    scale._find_platform.cache_clear()


@pytest.fixture(scope="module")
def priced(shared_data: Any) -> Iterator[dict[str, Priced]]:
    """Rows of each source beside their predictions; scales are fitted to some steps of all other
    sources."""
    steps = list_some_steps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "_list_steps", lambda: steps)
        forget_platforms()
        sources = dict[str, Priced]()
        for list_rows in scale.LISTS:
            rows = list(list_rows())
            sources[rows[0].source] = Priced(rows, scale.price_rows(rows))
        yield sources
        forget_platforms()


@pytest.mark.parametrize(
    ("source", "least"),
    [("vtrain", 594), ("torchtitan", 11), ("nvidia", 15), ("megatron", 9), ("seqsel", 9)],
)
def test_steps_of_a_source_that_no_scale_was_fitted_to(
    priced: dict[str, Priced], source: str, least: int
) -> None:
    errors = np.abs([row["error"] for row in priced[source].figures])
    assert len(priced[source].rows) == least
    assert 100 * errors.mean() <= scale.BARS[source], errors
    assert 100 * np.median(errors) <= scale.BARS[source]


def test_intervals_hold_most_steps_of_sources_that_were_left_out(
    priced: dict[str, Priced],
) -> None:
    inside = list[bool]()
    for source in priced.values():
        inside += [row["low"] <= row["measured"] <= row["high"] for row in source.figures]
    assert 0.7 <= np.mean(inside) <= 0.9, np.mean(inside)


@pytest.mark.parametrize(("source", "runs"), [("vtrain", 10), ("nvidia", 6)])
def test_half_of_the_models_by_a_tuning_to_the_others(
    priced: dict[str, Priced], source: str, runs: int
) -> None:
    """One draw of the ten that the benchmark takes, with fewer runs than its 30."""
    rows = priced[source].rows
    if source == "vtrain":
        rows = list(scale.list_vtrain(alone=True))[::6]
    figures = scale.judge_tuned(rows, scale.HALVES, draws=1, runs=runs)
    assert figures["mean"] <= figures["bar"], figures
