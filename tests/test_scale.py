"""Bars of `benchmarks.scale` for published steps with several kinds of parallelism: no scale knows
their source."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_context, scale

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
#: Of the steps that scales are fitted to, every second of MPT on H100 and every twelfth of the
#: large sources on A100.
_EACH = {"mpt": {"h100-sxm": 2, "a100-sxm": 12, "a100-sxm-40gb": 12}, "vtrain": {"a100-sxm": 12}}


@pytest.fixture(scope="module")
def priced(
    shared_data: Any,
) -> Iterator[dict[str, tuple[Sequence[scale.Row], Sequence[dict[str, float]]]]]:
    """Rows of each source beside their predictions; scales are fitted to some steps of all other
    sources."""
    groups = dict[tuple[str, str], list[Any]]()
    for row in gpu_context.read_rows():
        groups.setdefault((row["source"], row["device"]), []).append(row)
    rows = [
        row
        for (source, device), own in groups.items()
        if source in gpu_context.FITTED
        for row in own[:: _EACH.get(source, {}).get(device, 1)]
    ]
    steps = [step for step in gpu_context.list_steps(rows) if gpu_context.is_fitted(step)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "_list_steps", lambda: steps)
        scale._find_platform.cache_clear()
        listed = [list(each()) for each in scale.LISTS]
        yield {own[0].source: (own, scale.price_rows(own)) for own in listed}
        scale._find_platform.cache_clear()


@pytest.mark.parametrize(
    ("source", "least"),
    [("vtrain", 594), ("torchtitan", 11), ("nvidia", 15), ("megatron", 9), ("seqsel", 9)],
)
def test_steps_of_a_source_that_no_scale_was_fitted_to(
    priced: Any, source: str, least: int
) -> None:
    rows, found = priced[source]
    errors = np.array([one["error"] for one in found])
    assert len(rows) == least and 100 * np.abs(errors).mean() <= scale.BARS[source], errors
    assert 100 * np.median(np.abs(errors)) <= scale.BARS[source]


def test_intervals_hold_most_steps_of_sources_that_were_left_out(priced: Any) -> None:
    found = [one for _, own in priced.values() for one in own]
    inside = np.mean([one["low"] <= one["measured"] <= one["high"] for one in found])
    assert 0.7 <= inside <= 0.9, inside


@pytest.mark.parametrize(("source", "runs"), [("vtrain", 10), ("nvidia", 6)])
def test_half_of_the_models_by_a_tuning_to_the_others(priced: Any, source: str, runs: int) -> None:
    """One draw of the ten that the benchmark takes, with fewer runs than its 30."""
    rows = list(scale.list_vtrain(alone=True))[::6] if source == "vtrain" else priced[source][0]
    found = scale.judge_tuned(rows, scale.HALVES, draws=1, runs=runs)
    assert found["mean"] <= found["bar"], found
