"""Colours, legends and axes that all charts share."""

import math
from itertools import combinations

import pytest
import vl_convert

from perfkit import plots
from perfkit.plots import colours
from perfkit.sharding.problem import MESSAGES


def measure_lightness_and_hue(shade: str) -> tuple[float, float, float]:
    """A colour as people see it: CIE 1976 L*a*b* under D65 (IEC 61966-2-1 for sRGB)."""
    linear = []
    for start in (1, 3, 5):
        share = int(shade[start : start + 2], 16) / 255
        if share <= 0.04045:
            linear.append(share / 12.92)
        else:
            linear.append(((share + 0.055) / 1.055) ** 2.4)
    red, green, blue = linear
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z)
    )
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("shades", [colours.CLASSES, colours.PHASES, colours.USES])
def test_colours_of_different_things_are_far_apart(shades: dict[str, str]) -> None:
    """A difference of 2.3 is just seen; neighbours of a chart need much more."""
    for one, other in combinations(sorted(set(shades.values())), 2):
        distance = math.dist(measure_lightness_and_hue(one), measure_lightness_and_hue(other))
        assert distance > 20, (one, other)


def test_legends_of_breakdowns_have_one_order() -> None:
    def list_kinds(times: dict[str, float]) -> list[str]:
        rows = [{"phase": "forward", "kind": kind, "time_s": time} for kind, time in times.items()]
        spec = plots.breakdown_bars(rows).to_dict()
        kinds: list[str] = spec["encoding"]["color"]["scale"]["domain"]
        return kinds

    once = list_kinds({"host": 3.0, "gemm": 2.0, "collective": 1.0, "mine": 4.0})
    again = list_kinds({"collective": 3.0, "mine": 0.1, "gemm": 1.0, "host": 0.5})
    assert once == again == ["gemm", "collective", "host", "mine"]


def draw_labels(column: str, values: list[float]) -> str:
    """The picture of a sweep over a column."""
    rows = [{column: value, "time_s": 1.0} for value in values]
    drawn: str = vl_convert.vegalite_to_svg(plots.sweep_lines(rows, x=column).to_json())
    return drawn


def test_axes_have_the_unit_at_the_end_of_the_name_of_a_column() -> None:
    assert ">1 MB<" in draw_labels("moved_bytes", [1e3, 1e6, 1e9])
    assert ">1 GB/s<" in draw_labels("moved_bytes_per_s", [1e6, 1e9, 1e12])
    assert ">1 ms<" in draw_labels("loading_s", [1e-6, 1e-3, 1.0])
    assert ">1k<" in draw_labels("samples_per_s", [10.0, 1e3, 1e5])


def test_a_thousand_seconds_are_seconds() -> None:
    drawn = draw_labels("loading_s", [1.0, 1e5])
    assert ">1,000 s<" in drawn
    assert ">10 s<" in drawn
    assert "ks<" not in drawn


def test_messages_of_tables_have_the_colours_of_communication_in_all_charts() -> None:
    """What one chart sums as messages another one shows as an exchange of pooled rows."""
    assert {message.part for message in MESSAGES} <= {*colours.CLASSES}
    assert colours.CLASSES["exchange of pooled rows"] == colours.CLASSES["messages"]
