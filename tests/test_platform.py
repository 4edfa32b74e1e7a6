"""Platforms: lossless files, clear refusals, and estimates that obey their bounds."""

import html
import json
import math
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from perfkit.fitting import Additive, Caches, Fit, Overlap, Pipelined, Roofline, TiledRoofline
from perfkit.ground import units
from perfkit.ground.files import find_reference
from perfkit.ground.hardware import DTYPES, KINDS, Device, Link, MemoryLevel, Network, Quantity
from perfkit.ground.schemas import Table
from perfkit.platform import schema
from perfkit.platform.estimates import Estimate, ExtrapolationWarning
from perfkit.platform.file import encode, format_toml
from perfkit.platform.gallery import load_platform
from perfkit.platform.kernels import find_kernel
from perfkit.platform.machine import (
    HOST_OVERHEADS,
    LARGEST,
    LIMITS,
    Context,
    PlatformError,
    list_numbers,
)
from perfkit.platform.platform import Platform
from perfkit.workloads.tables import EmbeddingTable, TableSet

F = TypeVar("F", bound=Fit)

GALLERY = sorted(path.stem for path in find_reference("platforms").glob("*.toml"))
HOSTILE = "<script>alert(1)</script>"
H100 = load_platform("h100-sxm-8")
CURVE = Pipelined.build(
    {"alpha": 6e-6, "beta": 3e-12, "sharpness": 0.6},
    ranges={"nbytes": (512.0, 5e8)},
    source="test",
    units={"alpha": "s", "beta": "s/B", "sharpness": "-"},
)
TEXT = replace(H100, collectives={"all_reduce.2": CURVE}).to_toml()

words = st.text(min_size=1, max_size=12) | st.sampled_from(
    ["new\nline\r\n\t\x00\x7f", 'quote" \\ back', HOSTILE, "µ→日本"]
)
finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(0.0, LARGEST)


quantities = st.builds(
    Quantity,
    value=seconds,
    unit=st.just("s"),
    kind=st.sampled_from(KINDS),
    source=words.filter(str.strip),
    date=words,
    stderr=seconds,
    basis=st.text(max_size=10),
)
peaks = st.builds(
    Quantity,
    value=st.floats(5e-324, allow_infinity=False),
    unit=st.just("FLOP/s"),
    kind=st.just("assumed"),
    source=st.just("x"),
)


def between_limits(name: str) -> st.SearchStrategy[float]:
    """Values that a parameter of a fit may have."""
    return st.floats(*LIMITS.get(name, (0.0, LARGEST)))


@st.composite
def draw_fit(draw: st.DrawFn) -> Roofline:
    """A roofline with all that a file can say of it."""
    gemm = H100.kernels["gemm"]
    parameters = {name: draw(between_limits(name)) for name in gemm}
    errors = {"launch": draw(seconds)}
    ranges = {draw(words): (draw(finite), math.inf)}
    spread_time = draw(st.none() | between_limits("spread_time"))
    return Roofline.build(
        parameters,
        stderr=errors,
        spread=draw(between_limits("spread")),
        n=draw(st.integers(0, 2**62)),
        bias=draw(between_limits("bias")),
        ranges=ranges,
        source=draw(words),
        units=gemm.units,
        at_bounds=("launch",),
        quality="poor",
        spread_time=spread_time,
        notes=(draw(words),),
    )


@st.composite
def draw_platform(draw: st.DrawFn) -> Platform:
    """A platform with a peak, a fit and an overhead of any name."""
    fit = draw(draw_fit())
    overlap = Overlap.build({"contention": 0.5}, source=fit.source, notes=fit.notes)
    device = replace(H100.device, name=draw(words), peaks={"fp4": draw(peaks)})
    return replace(
        H100,
        name=draw(words),
        device=device,
        kernels={draw(words): fit},
        host={f"{draw(st.sampled_from(HOST_OVERHEADS))}.{draw(words)}": draw(quantities)},
        provenance={draw(words): draw(words)},
        context=Context(overlap=overlap),
    )


@settings(max_examples=25, deadline=None)
@given(draw_platform())
def test_a_file_keeps_every_bit(platform: Platform) -> None:
    again = Platform.from_toml(platform.to_toml())
    assert again == platform
    assert again.to_toml() == platform.to_toml()


@pytest.mark.parametrize("name", GALLERY)
def test_gallery_entries_are_whole(name: str) -> None:
    platform = load_platform(name)
    path = find_reference("platforms", f"{name}.toml")
    assert platform.name == name
    assert path.read_text(encoding="utf-8") == platform.to_toml(), (
        "written by hand? save it with Platform.save"
    )
    table = platform.numbers()
    assert table["source"].str.len_chars().min() > 5
    assert table["date"].str.len_chars().min() == 10
    assert set(table["kind"]) <= set(KINDS)
    assert table["value"].is_finite().all()
    for number in list_numbers(platform):
        # whose sizes the operating system tells, in bytes
        basis = number.basis or platform.device.kind == "cpu"
        assert number.kind != "datasheet" or (basis and number.source and number.date), number
    for key, fit in {**platform.kernels, **platform.collectives}.items():
        assert all(
            math.isfinite(error) and fit.units[name] for name, error in fit.stderr.items()
        ), key
        assert fit.source and fit.date and (fit.n or fit.kind != "fitted"), key
        fixed = {"sharpness"} if key in platform.collectives else set()
        unsure = {*fit} - {*fit.stderr, *fit.at_bounds} - fixed
        assert not unsure or fit.notes or fit.kind != "fitted", (
            f"{key}: no standard error of {unsure}, and no reason"
        )
    for source in {fit.source for fit in platform.kernels.values() if fit.kind == "fitted"}:
        assert any(
            name in source
            for name in (
                "aiconfigurator",
                "perfkit",
                "arXiv",
                "NeuSight",
                "issue 2491",
                "recsys-examples",
            )
        )


@pytest.mark.parametrize(
    ("table", "record"),
    [
        (schema.QuantityTable, Quantity),
        (schema.MemoryLevelTable, MemoryLevel),
        (schema.DeviceTable, Device),
        (schema.LinkTable, Link),
        (schema.NetworkTable, Network),
        (schema.ContextTable, Context),
    ],
)
def test_tables_of_a_file_have_the_fields_of_their_records(
    table: type[Table], record: type[Any]
) -> None:
    assert {field.name for field in structs.fields(table)} == {
        field.name for field in fields(record)
    }


def test_the_table_of_a_fit_has_its_form_its_parameters_and_the_fields_of_every_fit() -> None:
    of_parameters = {"form", "parameters", "units", "stderr"}
    assert {field.name for field in structs.fields(schema.FitTable)} == {
        *of_parameters,
        *(field.name for field in fields(Fit)),
    }


def test_a_platform_file_has_the_fields_of_a_platform() -> None:
    names = {field.name for field in structs.fields(schema.PlatformFile)}
    kept = {field.name for field in fields(Platform) if field.compare}
    assert names - {"format"} == kept
    # where a platform was read from is all that a file does not hold
    assert {field.name for field in fields(Platform)} - kept == {"origin"}


def test_what_could_not_be_read_back_is_not_written() -> None:
    kernels = {"gemm": replace(H100.kernels["gemm"], source="")}
    message = r"platform 'h100-sxm-8': kernels\.gemm\.source is missing.*; complete it first"
    with pytest.raises(PlatformError, match=message):
        replace(H100, kernels=kernels).to_toml()


# Refusals: what is changed in a good file, and what the message must say.
PEAK, HEAD = 'bf16 = { value = 9.894e14, unit = "FLOP/s", kind = "datasheet"', "format = 2\n"
FIT = '[collectives."all_reduce.2"]\nform = "pipelined"\nparameters = { alpha = 6e-06'
ORIGIN = f"source = {json.dumps(H100.device.peaks['bf16'].source)}"
LINE = next(line for line in TEXT.splitlines() if line.startswith("bf16 = ") and ORIGIN in line)
BROKEN = [
    *(
        (PEAK, PEAK.replace("9.894e14", value), message)
        for value, message in {
            '"fast"': "device.peaks.bf16.value is 'fast'; it must be a number",
            "2026-01-01": "device.peaks.bf16.value is datetime.date",
            "nan": r"peak bf16 is nan; it must be a number above 0 \[FLOP/s\]",
            "1" + "0" * 400: "peaks.bf16.value is 1000",
        }.items()
    ),
    *(
        (text, text.replace(part, ""), f"device.peaks.bf16.{part.split()[0]} is missing")
        for text, part in (
            (PEAK, "value = 9.894e14, "),
            (PEAK, 'unit = "FLOP/s", '),
            (LINE, f"{ORIGIN}, "),
        )
    ),
    (LINE, LINE.replace(ORIGIN, 'source = "  "'), "peak bf16: source is blank"),
    (
        PEAK,
        PEAK.replace('"FLOP/s"', '"TFLOP/s"'),
        "peak bf16: unit is 'TFLOP/s'; it must be FLOP/s",
    ),
    (
        PEAK,
        PEAK.replace('"datasheet"', '"rumour"'),
        "peak bf16: kind is 'rumour'; .* datasheet, measured, fitted",
    ),
    (PEAK, PEAK.replace("bf16", "bf17"), "device.peaks is 'bf17'; .* did you mean 'bf16'"),
    (
        "[network]\nranks_per_node = 8\nnodes = 1\nrails = 1",
        "[[network]]",
        r"network is \[.*; it must be a table",
    ),
    (
        "ranks_per_node = 8\n",
        "ranks_per_node = 0\n",
        "network.ranks_per_node is 0; it must be a whole number above 0",
    ),
    ('kind = "cuda"', 'kind = "tpu"', "device.kind is 'tpu'; known are cpu, cuda"),
    (
        "ranks_per_node = 8\n",
        "ranks_per_nodes = 8\n",
        "network.ranks_per_nodes is not known; known here are .*; did you mean ranks_per_node",
    ),
    (
        "ranks_per_node = 8\n",
        "ranks_per_node = 8.0\n",
        "network.ranks_per_node is 8.0; it must be a whole number",
    ),
    (
        PEAK,
        PEAK.replace("9.894e14", "true"),
        "device.peaks.bf16.value is True; it must be a number",
    ),
    (HEAD, "", "format is missing; this perfkit reads format 2"),
    (HEAD, "format = 3\n", "format is 3; this perfkit reads format 2"),
    (HEAD, "format = \n", r"h100.toml: Invalid value \(at line 1, column 10\)"),
    (HEAD, "x = " + "[" * 5000 + "\n", "h100.toml: RecursionError"),
    (
        FIT,
        FIT.replace("alpha", "alfa"),
        r"""collectives."all_reduce\.2": alfa is not a parameter""",
    ),
    (
        'alpha = "s"',
        'alpha = "furlong"',
        "all_reduce.2 alpha: unit is 'furlong'; it must be made of",
    ),
    ('alpha = "s", ', "", 'collectives."all_reduce.2".units.alpha is missing'),
    ('source = "test"\n', "", 'collectives."all_reduce.2".source is missing'),
    ('"all_reduce.2"', '"all_redoce.2"', "all_redoce.2.*must be <operation>.<ranks or any>"),
]


@pytest.mark.parametrize(("old", "new", "message"), BROKEN)
def test_a_broken_file_is_refused_with_place_and_reason(old: str, new: str, message: str) -> None:
    assert old in TEXT, "the test no longer fits the gallery file"
    with pytest.raises(PlatformError, match=message) as caught:
        Platform.from_toml(TEXT.replace(old, new), origin="h100.toml")
    text = str(caught.value)
    assert text.startswith("h100.toml: ")
    assert "compare with reference_data/platforms/" in text
    assert "\n" not in text


def odd(model: type[F], **parameters: float) -> F:
    return model.build(parameters, source="test")


# Numbers that no machine has: what is changed in a platform, and the place that the message must
# name.
GEMM = H100.kernels["gemm"]
GAP = H100.host["gap"]
L2 = MemoryLevel("L2", Quantity(math.inf, "B", "assumed", "x"))
OUT_OF_RANGE = {
    **{
        message: {"kernels": {"gemm": fit}}
        for message, fit in {
            "kernel gemm launch is -1.0": GEMM.with_values({"launch": -1.0}),
            "kernel gemm sharpness is 1e-308; .* from 0.1 to 1000": GEMM.with_values(
                {"sharpness": 1e-308}
            ),
            "kernel gemm launch: stderr is -1.0": GEMM.with_values({}, stderr={"launch": -1.0}),
            "kernel gemm spread is 1e\\+30; .* from 0 to 10": replace(GEMM, spread=1e30),
            "kernel gemm bias is nan": replace(GEMM, bias=math.nan),
            r"kernel gemm: range of 'flops' is \(2.0, 1.0\)": replace(
                GEMM, ranges={"flops": (2.0, 1.0)}
            ),
        }.items()
    },
    "kernel gemm.nn: lookups is not a parameter of this fit; additive takes launch, tiled_flops": {
        "kernels": {"gemm.nn": odd(Additive, launch=1e-6, lookups=1e-9)}
    },
    "kernel transfer: flops is not a parameter of this fit": {
        "kernels": {"transfer": odd(Additive, flops=1e-9)}
    },
    "kernel embedding_forward: form is 'tiled'; only products have tiles": {
        "kernels": {
            "embedding_forward": TiledRoofline.build(
                {**GEMM, "tile_m": 32.0, "tile_n": 32.0}, source="test"
            )
        }
    },
    "kernel right of it right is -1.0": {"kernels": {"right of it": odd(Additive, right=-1.0)}},
    "collective all_reduce.2 beta is 0.0; .* above 0": {
        "collectives": {"all_reduce.2": CURVE.with_values({"beta": 0.0})}
    },
    "context overlap contention is 1.5": {"context": Context(overlap=odd(Overlap, contention=1.5))},
    "context caches pages is -1.0": {
        "context": Context(caches=odd(Caches, l2=1, l3=1, pages=-1.0))
    },
    "host gap: stderr is 1e\\+308": {"host": {"gap": replace(GAP, stderr=1e308)}},
    r"device\.memory has no bandwidth in its last level": {
        "device": replace(H100.device, memory=(L2,))
    },
    "memory L2 capacity is inf": {"device": replace(H100.device, memory=(L2, *H100.device.memory))},
}


@pytest.mark.parametrize("message", OUT_OF_RANGE)
def test_numbers_that_no_machine_has_are_refused_wherever_they_come_from(message: str) -> None:
    change = OUT_OF_RANGE[message]
    with pytest.raises(PlatformError, match=f"platform 'h100-sxm-8': {message}") as caught:
        replace(H100, **change)
    assert "\n" not in str(caught.value)
    raw = object.__new__(Platform)  # what a file holds, which nobody has checked
    raw.__dict__.update(vars(H100) | change)
    with pytest.raises(PlatformError, match=f"h100.toml: .*{message}"):
        Platform.from_toml(format_toml({"format": 2, **encode(raw)}), origin="h100.toml")


# Finding platforms.
@pytest.mark.parametrize("limits", [{"high": 1e-6}, {"low": 1e-5}])
def test_a_parameter_outside_its_own_limits_is_refused(limits: dict[str, float]) -> None:
    curve = replace(CURVE, alpha=replace(CURVE.alpha, **limits))
    message = "collective all_reduce.2 alpha is 6e-06; it must be a number from "
    with pytest.raises(PlatformError, match=message):
        replace(H100, collectives={"all_reduce.2": curve})


def test_platforms_are_found_by_name_path_and_value(tmp_path: Path) -> None:
    assert load_platform(H100) is H100
    path = H100.save(tmp_path / "mine.toml")
    assert load_platform(path) == load_platform(str(path)) == H100
    replace(H100, name="changed").save(path)
    assert load_platform(path).name == "changed"
    for name, message in (
        (tmp_path / "mine", r"known by their ending; name it .*mine\.toml"),
        (tmp_path / "no" / "mine.toml", "create it first"),
        (7, "path is 7; it must be the name of a file to write, a str or a Path"),
    ):
        with pytest.raises(ValueError, match=message):
            H100.save(name)
    path.write_bytes(b"\xff")
    with pytest.raises(PlatformError, match=r"mine\.toml cannot be read: .*utf-8"):
        Platform.load(path)
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert Platform.load(path) == Platform.from_toml(TEXT)


UNKNOWN = [
    ("h100-smx-8", "did you mean 'h100-sxm-8'"),
    ("rtx-409-1", "did you mean 'rtx-4090'. known are a100-sxm-8, .*, rtx-4090, "),
    ("mi300-8", "did you mean 'mi300x'"),
    ("no/such.toml", "no/such.toml cannot be read.*gallery: .*h100-sxm-8"),
    (Path("nowhere"), "nowhere"),
    (None, "platform is None"),
    (["x"], "known are"),
    ("nul\0.toml", "no name of a file holds"),
]


@pytest.mark.parametrize(("name", "message"), UNKNOWN)
def test_an_unknown_platform_lists_the_known_ones(name: object, message: str) -> None:
    with pytest.raises(PlatformError, match=message):
        load_platform(name)  # type: ignore[arg-type]


def test_names_from_files_are_text_everywhere() -> None:
    gemm = replace(H100.kernels["gemm"], source=HOSTILE, notes=(HOSTILE,))
    device = replace(H100.device, name=HOSTILE)
    platform = replace(
        H100, name=HOSTILE, device=device, kernels={"gemm": gemm, HOSTILE: gemm}, collectives={}
    )
    assert Platform.from_toml(platform.to_toml()) == platform
    for thing in (platform, gemm, platform.gemm(512, 512, 512, dtype="bf16")):
        assert HOSTILE not in thing._repr_html_()
        assert "&lt;script&gt;" in thing._repr_html_()
        assert "\n" not in repr(thing)


# Estimates.
def test_an_estimate_explains_itself() -> None:
    estimate = H100.collective("all_reduce", 64 * 2**20, ranks=8)
    assert sum(estimate.terms.values()) == pytest.approx(estimate.time, rel=1e-12)
    low, high = estimate.interval()
    assert low * high == pytest.approx(estimate.time**2)
    assert math.log(high / low) / 2 == pytest.approx(1.2816 * estimate.spread, rel=1e-3)
    text = estimate.explain()
    assert "67.1 MB" in text
    assert "n)^q" in text
    assert units.format_time(estimate.time) in text
    with pytest.raises(ValueError, match="level is 1"):
        estimate.interval(1)
    assert "warning: careful" in replace(estimate, warnings=("careful",)).explain()
    text = repr(Estimate(0.0412, 0.0, {}, "", ("careful",)))
    assert text == "Estimate(41.2 ms, 80 % within 41.2 ms to 41.2 ms, 1 warning)"


@given(
    st.floats(0, 1e9),
    st.floats(1, 1e3),
    st.sampled_from(["all_reduce", "all_gather", "all_to_all", "broadcast"]),
)
def test_collectives_grow_with_bytes_and_keep_their_parts(
    nbytes: float, factor: float, operation: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        small = H100.collective(operation, nbytes, ranks=8)
        large = H100.collective(operation, nbytes * factor, ranks=8)
    assert 0 < small.time <= large.time * (1 + 1e-12)
    assert sum(small.terms.values()) == pytest.approx(small.time, rel=1e-9)
    arrays = H100.collective_time(operation, [nbytes, nbytes * factor], ranks=8)
    assert arrays == pytest.approx([small.time, large.time], rel=1e-12)


def test_no_time_leaves_that_is_none() -> None:
    for time, spread, parts in (
        (math.nan, 0, ()),
        (-1, 0, ()),
        (math.inf, 0, ()),
        (1, math.nan, ()),
        (1, 1e30, ()),
        (0, 0, (0,)),
        (1, 0.1, (0.5, 0.4)),
        (1, 0.1, (math.nan,)),
    ):
        with pytest.raises(ValueError, match=r"all_reduce of 1 B on 'x' takes .* s"):
            Estimate(
                time,
                spread,
                {str(i): part for i, part in enumerate(parts)},
                "all_reduce of 1 B on 'x': t = n",
            )
    tiny = GEMM.with_values({"compute_efficiency": 1e-6})
    peaks = {"bf16": replace(H100.device.peaks["bf16"], value=1e-300)}
    slow = replace(H100, kernels={"gemm": tiny}, device=replace(H100.device, peaks=peaks))
    text = r"gemm .* in bf16 on h100-sxm-8 takes (nan|inf) s"
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=text):
        slow.gemm(2**60, 2**60, 2**60, dtype="bf16")


def test_collectives_say_what_they_cannot_do() -> None:
    with pytest.raises(
        ValueError, match=r"no model for the collective 'all_redoce'; it has .*all_reduce"
    ):
        H100.collective("all_redoce", 1e6, ranks=8)
    for bad in (-1, math.nan, math.inf, "1 MB", None):
        for call in (H100.collective, H100.collective_time):
            with pytest.raises(ValueError, match="nbytes is "):
                call("all_reduce", bad, ranks=8)  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"working_set is .*; it must be a finite number of 0 or more"
        ):
            H100.device.bandwidth(bad)
    for ranks in (0, 2.5, "8", None, 16):
        with pytest.raises(ValueError, match="ranks is"):
            H100.collective("all_reduce", 1e6, ranks=ranks)  # type: ignore[arg-type]
    assert H100.collective("all_reduce", 1e6, ranks=1).time == 0
    # measured across nodes alone
    odd = replace(H100, collectives={"all_to_all.16": CURVE, "all_reduce.8": CURVE})
    with pytest.raises(
        ValueError, match=r"'all_to_all' on 4 ranks of one node; it has all_to_all\.16;"
    ):
        odd.collective("all_to_all", 1e6, ranks=4)


def test_sizes_outside_the_fitted_range_warn() -> None:
    with pytest.warns(
        ExtrapolationWarning, match="nbytes 4 GB is outside the fitted range 512 B to"
    ) as caught:
        estimate = H100.collective("all_reduce", 4e9, ranks=8)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert len(estimate.warnings) == 1
    with pytest.warns(ExtrapolationWarning, match="flops 2 FLOP is outside"):
        assert H100.gemm(1, 1, 1, dtype="bf16").warnings


sides = st.integers(1, 8192)


@settings(deadline=None)
@given(sides, sides, sides, st.sampled_from(["fp32", "bf16", "fp64"]), st.sampled_from([1, 7]))
def test_gemm_grows_and_is_never_faster_than_the_hardware(
    m: int, n: int, k: int, dtype: str, batch: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        estimate = H100.gemm(m, n, k, dtype=dtype, batch=batch)
        sizes = ((m + 1, n, k), (m, n + 16, k), (m, n, k + 16))  # rows aligned alike
        larger = [H100.gemm(*size, dtype=dtype, batch=batch).time for size in sizes]
    flops = 2 * batch * m * n * k
    nbytes = DTYPES[dtype] * batch * (m * k + k * n + m * n)
    bound = max(flops / H100.device.peaks[dtype].value, nbytes / 3.35e12)
    assert bound < estimate.time < min(larger) * (1 + 1e-12)
    assert sum(estimate.terms.values()) == pytest.approx(estimate.time, rel=1e-9)
    assert min(estimate.terms.values()) >= 0


def test_products_in_a_format_nobody_measured_are_less_sure() -> None:
    half = H100.gemm(4096, 4096, 4096, dtype="bf16").spread
    guess, bare = (
        H100.kernels["gemm.fp8"],
        {key: fit for key, fit in H100.kernels.items() if key != "gemm.fp8"},
    )
    assert "gemm bf16" in H100.kernels["gemm"].source
    assert guess.source.startswith("perfkit, h100-1")
    assert (guess.kind, guess.n) == ("fitted", 108)
    assert H100.gemm(4096, 4096, 4096, dtype="fp8").spread > half
    assert H100.gemm(4096, 4096, 4096, dtype="fp16").spread == half < 0.1
    assert 0.25 < H100.gemm(4096, 4096, 4096, dtype="tf32").spread < 0.3
    with pytest.warns(
        ExtrapolationWarning,
        match="transferred from bf16/fp16: no product in fp8 was measured here",
    ):
        assert replace(H100, kernels=bare).gemm(4096, 4096, 4096, dtype="fp8").spread > 1
    found = find_kernel(H100.kernels, "gemm", dtype="fp32")
    assert found is not None
    assert found[1].kind == "assumed"
    assert "fp32 is assumed to reach" in found[1].notes[0]
    assert find_kernel(H100.kernels, "elementwise", dtype="fp32") == (
        "elementwise",
        H100.kernels["elementwise"],
    )


def test_kernels_are_found_by_variant_then_format_then_class() -> None:
    gemm = H100.kernels["gemm"]
    fits = {
        key: replace(gemm, n=n)
        for n, key in enumerate(("gemm", "gemm.fp8", "gemm.nt", "gemm.fp8.nt"), 1)
    }
    asked = {
        "": "gemm",
        ".fp8": "gemm.fp8",
        "nt.fp8": "gemm.nt",
        "tn.fp8": "gemm.fp8",
        "tn.bf16": "gemm",
    }
    for name, key in asked.items():
        variant, _, dtype = name.partition(".")
        assert find_kernel(fits, "gemm", variant=variant, dtype=dtype or "bf16") == (key, fits[key])
    assert find_kernel(fits, "bmm") is None
    old = replace(gemm, dtypes=())  # whatever that was
    assert find_kernel({"gemm": old}, "gemm", dtype="fp8") == ("gemm", old)
    slow = gemm.with_values({"launch": 1.0})
    platform = replace(H100, kernels={"gemm": gemm, "gemm.fp8": slow})
    assert platform.gemm(64, 64, 64, dtype="fp8").time > 1
    assert platform.gemm(64, 64, 64, dtype="bf16").time < 1
    plain = replace(H100, kernels={"gemm": gemm})
    of_one_layout = replace(H100, kernels={"gemm.nt": gemm})
    expected = plain.gemm(512, 512, 512, dtype="bf16")
    assert of_one_layout.gemm(512, 512, 512, dtype="bf16") == expected


def test_gemm_turns_away_bad_sizes() -> None:
    for sizes in ((0, 1, 1), (1, -3, 1), (1, 1, 2.5), (1, 1, math.nan), ("8", 1, 1), (2**70, 1, 1)):
        with pytest.raises(ValueError, match=r"is .*; it must be a whole number above 0"):
            H100.gemm(*sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype is 'bf61'; known are .* did you mean 'bf16'"):
        H100.gemm(8, 8, 8, dtype="bf61")
    with pytest.raises(ValueError, match="no kernel model for 'bmm'; it has gemm; calibrate it"):
        replace(H100, kernels={"gemm": H100.kernels["gemm"]}).gemm(8, 8, 8, batch=2)


def test_bandwidth_is_continuous_over_the_levels() -> None:
    def level(name: str, capacity: float, bandwidth: float | None) -> MemoryLevel:
        rate = None if bandwidth is None else Quantity(bandwidth, "B/s", "assumed", "a test")
        return MemoryLevel(name, Quantity(capacity, "B", "assumed", "a test"), rate)

    device = replace(
        H100.device,
        kind="cpu",
        memory=(level("L1", 1e5, 4e11), level("L2", 1e6, None), level("DRAM", 1e11, 1e10)),
    )
    sizes = np.geomspace(1, 1e10, 2000)
    times = sizes / device.bandwidth(sizes)
    assert np.all(np.diff(times) > 0)
    assert np.max(times[1:] / times[:-1]) < 1.5
    assert device.bandwidth(1e4) == pytest.approx(4e11)
    assert device.bandwidth(1e12) == pytest.approx(1e10, rel=1e-3)
    assert device.bandwidth(0) == pytest.approx(4e11)
    # the last cache of a GPU serves rows of tables alone
    assert replace(device, kind="cuda").bandwidth(sizes) == pytest.approx(1e10)


def test_lookups_grow_with_batch_and_skip_to_the_tables() -> None:
    tables = (EmbeddingTable(10**6, 64, 10), EmbeddingTable(1000, 128, 1, 1.1))
    few = H100.lookup(tables, batch=64)
    many = H100.lookup(tables, batch=4096)
    assert 0 < few.time < many.time
    assert sum(many.terms.values()) == pytest.approx(many.time, rel=1e-12)
    parts = [H100.lookup([table], batch=4096).time for table in tables]
    assert 0.95 * many.time < sum(parts) <= many.time  # tables share the last cache
    bytes_moved = 4096 * 10 * (8 + 256) + 4096 * (8 + 256)
    assert parts[0] > bytes_moved / 3.35e12
    with pytest.raises(ValueError, match=r"tables is \[\]; pass at least one"):
        H100.lookup([], batch=64)
    with pytest.raises(ValueError, match="batch is -1"):
        H100.lookup(tables, batch=-1)
    assert (
        H100.lookup(TableSet(tables[:1]), batch=64).time == H100.lookup(tables[:1], batch=64).time
    )


def test_kernels_take_arrays() -> None:
    features = {"flops": np.array([1e6, 1e9, 1e12]), "nbytes": np.array([1e6, 1e6, 1e9])}
    times = H100.kernel_time("gemm", features, dtype="bf16")
    assert times.shape == (3,)
    assert np.all(np.diff(times) > 0)
    slow = H100.kernel_time("gemm", {**features, "peak": 1e12, "bandwidth": 1e10})
    assert np.all(slow > times)


def test_a_platform_shows_every_number() -> None:
    table = H100.numbers()
    assert table.columns == [
        "group",
        "name",
        "value",
        "unit",
        "kind",
        "stderr",
        "source",
        "date",
        "basis",
    ]
    assert set(table["group"]) == {
        "device",
        "peak",
        "memory",
        "link",
        "host",
        "kernel",
        "collective",
        "context",
    }
    assert table.filter(pl.col("name") == "bf16")["value"].item() == 989.4e12
    assert repr(H100).startswith("Platform('h100-sxm-8': 8 ranks of 'NVIDIA H100")
    assert "\n" not in repr(H100)
    assert html.unescape(H100._repr_html_()) == f"<pre>{H100!r}</pre>"
    json.dumps(table.to_dicts())


# The gallery against the measurements its fits were made from.
def name_system(platform: str) -> str:
    """The device of a platform as files of measurements call it: h100_sxm of h100-sxm-8."""
    return platform.removesuffix("-8").replace("-", "_")


def read(path: Path, what: pl.Expr) -> pl.DataFrame:
    return pl.read_csv(path, infer_schema_length=None).filter(what)


def check_errors(
    predicted: np.ndarray, micros: pl.Series, geomean: float, mean: float, p95: float
) -> None:
    error = np.abs(predicted / (micros.to_numpy() * 1e-6) - 1)
    found = np.exp(np.log(np.maximum(error, 1e-4)).mean()), error.mean(), np.quantile(error, 0.95)
    assert np.all(np.array(found) < np.array([geomean, mean, p95]) / 100)


@pytest.mark.parametrize(("name", "version"), [("a100-sxm-8", "2.27.3"), ("h100-sxm-8", "2.29.2")])
def test_measurements_are_met(name: str, version: str, shared_data: Path) -> None:
    platform = load_platform(name)
    held_out = (pl.col("split_random") == "test") & pl.col("train_like_mnk_ge_512")
    data = read(shared_data / "gemm" / f"gemm_bf16_{name_system(name)}.csv", held_out)
    m = data["m"].to_numpy().astype(float)
    n = data["n"].to_numpy().astype(float)
    k = data["k"].to_numpy().astype(float)
    features = {"flops": 2 * m * n * k, "nbytes": 2 * (m * k + k * n + m * n)}
    predicted = platform.kernel_time("gemm", features, dtype="bf16")
    check_errors(predicted, data["latency_us_sglang"], 5.5, 8.5, 25)  # DESIGN
    chosen = (pl.col("dtype") == "half") & (pl.col("nccl_version_recorded") == version)
    keys = ["op", "num_gpus", "message_bytes"]
    data = (
        read(shared_data / "nccl" / f"nccl_{name_system(name)}.csv", chosen)
        .group_by(keys)
        .agg(pl.col("latency_us").median())
        .sort(keys)
    )
    asked = data.select(pl.col("op").replace("alltoall", "all_to_all"), *keys[1:]).iter_rows()
    times = [
        float(platform.collective_time(name, nbytes, ranks=ranks)) for name, ranks, nbytes in asked
    ]
    check_errors(np.array(times), data["latency_us"], 5, 8, 24)  # DESIGN


@pytest.mark.parametrize(
    ("form", "numbers", "seconds"),
    [
        ("alpha_beta", "alpha = 1e-5, beta = 1e-11", 1e-5 + 1e-11 * 1e6),
        (
            "two_regime",
            "alpha1 = 1e-5, beta1 = 1e-9, alpha2 = 4e-5, beta2 = 1e-11",
            4e-5 + 1e-11 * 1e6,
        ),
    ],
)
def test_forms_of_earlier_files_are_sums(
    form: str, numbers: str, seconds: float, tmp_path: Path
) -> None:
    file = load_platform("h100-sxm-8").save(tmp_path / "p.toml")
    text = file.read_text()
    names = [entry.split(" = ")[0] for entry in numbers.split(", ")]
    units = ", ".join(f'{name} = "{"s/B" if "beta" in name else "s"}"' for name in names)
    table = f"""[collectives."all_reduce.5"]
form = "{form}"
parameters = {{ {numbers} }}
units = {{ {units} }}
kind = "assumed"
source = "an earlier file"

"""
    first = text.index("[collectives.")
    file.write_text(text[:first] + table + text[first:])
    platform = Platform.load(file)
    fit = platform.collectives["all_reduce.5"]
    assert fit.form in ("pipelined", "two_branch")
    assert fit["sharpness"] == 1.0
    assert float(fit.time(1e6)) == pytest.approx(seconds, rel=1e-12)
    again = Platform.load(platform.save(tmp_path / "again.toml"))
    assert again.collectives["all_reduce.5"] == fit


def test_a_host_holds_overheads_of_calls_alone() -> None:
    """Everything in it counts as one: in intervals, in what-ifs and in the time of operations."""
    page_fault = replace(GAP, value=2.6e-6)
    with pytest.raises(
        PlatformError, match="host is 'page_fault'; known are gap, bare, before_launch"
    ):
        replace(H100, host={**H100.host, "page_fault": page_fault})


def test_bandwidths_go_from_the_cache_to_the_network() -> None:
    frame = load_platform("h100-sxm-8x8").bandwidths()
    assert frame["way"].to_list() == ["L2", "HBM3", "NVLink", "PCIe from host", "adapter"]
    rates = frame["bandwidth_bytes_per_s"].to_list()
    assert rates == sorted(rates, reverse=True)
    assert frame["capacity_bytes"].to_list() == [50 * 2**20, 8e10, None, 2e12, None]
    assert frame["evidence"].to_list() == [
        "assumed",
        "datasheet",
        "datasheet",
        "measured",
        "fitted",
    ]


def test_bandwidths_name_a_host_only_where_one_is_known() -> None:
    for name in GALLERY:
        ways = load_platform(name).bandwidths()["way"].to_list()
        assert len(set(ways)) == len(ways), "rows of a chart have names of their own"
    assert "host" not in " ".join(load_platform("zen5-2").bandwidths()["way"])
    l40s = load_platform("l40s-8")
    assert "PCIe from host" not in l40s.bandwidths()["way"]
    with_host = l40s.with_host_memory(capacity=1e12, bandwidth=400e9, link=25e9)
    host = with_host.bandwidths().filter(way="PCIe from host")
    assert host["bandwidth_bytes_per_s"].to_list() == [25e9]


def test_a_platform_has_two_pictures() -> None:
    ladder = H100.chart("bandwidths").to_dict()
    assert ladder["title"]["text"] == "Bandwidths of h100-sxm-8"
    assert H100.chart().to_dict()["title"]["text"] == "A node of h100-sxm-8"
    with pytest.raises(ValueError, match=r"kind is 'nodes'; .* did you mean 'node'"):
        H100.chart("nodes")
