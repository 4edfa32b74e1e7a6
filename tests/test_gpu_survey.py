"""The survey of kernels of a GPU: what it would time runs on a CPU, and what was measured is read.

Tests have no GPU: operands are small and on the CPU, and calls of CUDA are replaced.
"""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the survey runs operations of torch")

from benchmarks import gpu_steps
from benchmarks.gpu_survey import SECTIONS
from benchmarks.helpers import gpu_survey_points as points
from benchmarks.helpers import gpu_survey_tables as tables
from perfkit.calibration.traces import read_trace
from perfkit.ground.files import find_reference
from perfkit.platform.gallery import load_platform

ROOT = Path(__file__).parents[1]
#: Operands of a dry run at most [B].
SMALL = 3e7
#: What only a GPU has, or what takes long to compile on a CPU.
ONLY_GPU = {
    *("product_into_fp32", "added_inside_fp32"),
    *("tensor", "tensor_fast", "row", "row_fast"),
    *("block_1x128_by_128x128", "block_1x128_by_1x128"),
    *("cast_tensor_compiled", "cast_row_compiled", "cast_block_compiled"),
    *("rms_norm_backward", "rowwise_adagrad_one_kernel"),
}

BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("polars", "msgspec", "altair"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import benchmarks.gpu_survey, benchmarks.helpers.gpu_survey_points, benchmarks.gpu_steps, perfkit.measure.cuda
"""


def test_what_measures_needs_no_package_that_only_predictions_need() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


def list_smallest(section: str) -> list[points.Point]:
    """The point with the smallest operands of each name of a section that runs on a CPU."""
    smallest = dict[str, points.Point]()
    for point in points.SECTIONS[section]():
        known = smallest.get(point.name)
        if known is None or point.nbytes < known.nbytes:
            smallest[point.name] = point
    return [p for p in smallest.values() if p.name not in ONLY_GPU and p.nbytes < SMALL]


def test_kernels_of_every_section_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(points.SECTIONS) == SECTIONS
    monkeypatch.setattr(points, "DEVICE", "cpu")
    names = set[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about sparse tensors
        for section in SECTIONS:
            for point in list_smallest(section):
                point.make()()
                names.add(point.name)
    points._make_table.cache_clear()
    assert {"product", "bf16", "cast_row", "softmax_backward", "nt", "rowwise_adagrad"} <= names


def test_attention_and_experts_run_with_fewer_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "DEVICE", "cpu")
    sizes = {"batch": 1, "heads": 2, "sequence": 16, "width": 32, "causal": 1}
    for backend in ("flash", "math"):
        assert points._attend(backend, "forward", sizes)().shape == (1, 2, 16, 32)
        assert len(points._attend(backend, "backward", sizes)()) == 3
    shapes = {
        "grouped": (32, 16),
        "grouped_zipf": (32, 16),
        "grouped_input_gradient": (32, 32),
        "grouped_weight_gradient": (4, 32, 16),
        "batched": (4, 8, 16),
    }
    for name, shape in shapes.items():
        assert points._multiply_experts(name, 4, 8, 32, 16)().shape == shape
    assert points._multiply_experts("one_by_one", 4, 8, 32, 16)() is None


def test_experts_have_all_tokens_by_zipfs_law() -> None:
    counts = points._count_rows(8, 1024)
    assert sum(counts) == 1024
    assert counts == sorted(counts, reverse=True)
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.01)


class Event:
    """A clock of a device on which every call takes a millisecond."""

    now = 0.0

    def __init__(self, **_: Any) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.time - self.time


def test_points_are_timed_in_rotation_over_more_than_the_last_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cuda, made = points.torch.cuda, list[int]()

    class Device:
        name, total_memory, L2_cache_size = "toy", 1000, 100

    def make() -> Any:
        made.append(1)
        return call

    def call() -> None:
        Event.now += 1.0

    def fail() -> Any:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: Device)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(cuda, name, lambda: None)
    monkeypatch.setattr(cuda, "_sleep", lambda _: None, raising=False)
    kernels = [points.Point("a", "bf16", make, 80.0), points.Point("b", "bf16", fail, 80.0)]
    monkeypatch.setattr(points, "SECTIONS", {"s": lambda: iter(kernels)})
    for number in (1, 2):
        points.measure(tmp_path / f"{number}.jsonl", {"s": 60.0})
    assert len(made) == 2 * (1 + 3), "operands of 80 B rotate through at least 200 B"
    survey = tables.join_survey([tmp_path / "1.jsonl", tmp_path / "2.jsonl"])
    first, second = survey.timings
    assert (first.name, first.medians, first.spreads) == ("a", (1e-3, 1e-3), (0.0, 0.0))
    assert (second.medians, second.failed) == ((), "RuntimeError no such kernel")
    assert survey.facts["device"] == "toy"
    tables.write_survey(survey, tmp_path / "joined.json")
    assert tables.read_survey(tmp_path / "joined.json") == survey


def test_a_survey_is_told_from_other_files(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"format": 1, "runs": []}')
    with pytest.raises(ValueError, match="no survey"):
        tables.read_survey(tmp_path / "x.json")


def test_the_committed_survey_is_whole() -> None:
    survey = tables.read_survey(find_reference("measured", "h200-2.survey.json"))
    timed = [timing for timing in survey.timings if not timing.failed]
    assert (survey.facts["device"], len(survey.timings), len(timed)) == ("NVIDIA H200", 2028, 2020)
    listed = sum(len([*make()]) for make in points.SECTIONS.values())
    assert listed == len(survey.timings)
    assert all(timing.seconds > 0 and len(timing.medians) == 2 for timing in timed)


@pytest.mark.parametrize(
    ("name", "kernels"), [("gpt2", {"embedding", "addmm"}), ("dlrm", {"_embedding_bag", "addmm"})]
)
def test_traces_of_a_gpu_that_ship_are_read(name: str, kernels: set[str]) -> None:
    trace = read_trace(find_reference("measured", f"h200-2.{name}.json.gz"))
    assert "NVIDIA H200" in repr(trace)
    assert trace.steps()["kept"].to_list() == [False, True, True], (
        "in the first the profiler starts"
    )
    timeline = trace.timeline()
    assert kernels <= {*timeline["name"]}
    assert {"forward", "backward", "update"} <= {*timeline["phase"]}
    assert {*timeline["stream"]} == {"compute", "copies"}


def test_steps_come_from_a_set_or_a_file(tmp_path: Path) -> None:
    third = gpu_steps.list_steps("third")
    assert {step.execution for step in third} == {*gpu_steps.EXECUTIONS}
    path = tmp_path / "steps.json"
    path.write_text(json.dumps([step._asdict() for step in third]))
    assert gpu_steps.read_steps(path) == third
    path.write_text('[{"model": "bert"}]')
    with pytest.raises(ValueError, match="no list of steps"):
        gpu_steps.read_steps(path)


def test_chosen_steps_are_traced_in_the_first_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Device:
        name, total_memory, L2_cache_size = "toy", 1000, 100

    asked = list[tuple[str, bool]]()

    def time_step(step: gpu_steps.Step, folder: Path | None) -> dict[str, Any]:
        asked.append((step.execution, folder is not None))
        return {"name": step.name, "in_a_row": {"median": 1.0}}

    monkeypatch.setattr(points.torch.cuda, "get_device_properties", lambda _: Device)
    monkeypatch.setattr(gpu_steps, "time_step", time_step)
    steps = [gpu_steps.Step("bert", {}, "bf16", execution) for execution in gpu_steps.EXECUTIONS]
    gpu_steps.measure_steps(tmp_path, steps, traced=["eager"])
    first = [("eager", True), ("compiled", False), ("graphs", False)]
    assert asked == [*first, ("eager", False), ("graphs", False)]
    assert len(json.loads((tmp_path / "steps.json").read_text())["rows"]) == 5


def test_kernels_of_the_survey_are_operations_of_perfkit() -> None:
    sizes = {"m": 8.0, "n": 16.0, "k": 32.0}
    after = tables.Timing("accumulation", "added_after_fp32", "bf16", sizes, (1.0,))
    product, addition = tables.list_work(after)
    assert (product.variant, product.sizes.flops) == ("tn", 2 * 8 * 16 * 32)
    assert product.nbytes == 2 * (8 * 32 + 32 * 16 + 8 * 16)
    assert addition.nbytes == (2 + 4 + 4) * 8 * 16
    (narrow,) = tables.list_work(tables.Timing("fp8", "tensor", "fp8", sizes, (1.0,)))
    assert narrow.nbytes == 8 * 32 + 32 * 16 + 2 * 8 * 16, "its result is in bf16"
    whole = {"batch": 1.0, "heads": 2.0, "sequence": 64.0, "width": 32.0, "causal": 1.0}
    (forward,) = tables.list_work(
        tables.Timing("attention", "cudnn_forward", "bf16", whole, (1.0,))
    )
    assert (forward.variant, forward.sizes.flops) == (
        "forward_causal.flash3",
        2 * 2 * 64**2 * 32,
    )
    for name in ("added_inside_fp32", "row", "math_forward"):
        section = "attention" if "math" in name else "accumulation"
        assert tables.list_work(tables.Timing(section, name, "bf16", whole | sizes, (1.0,))) == []


def test_prices_are_those_of_the_platform() -> None:
    timings = [
        tables.Timing("accumulation", name, "bf16", {"m": 512.0, "n": 256.0, "k": 128.0}, (1.0,))
        for name in ("product", "added_after_bf16")
    ]
    product, both = (tables.list_work(timing) for timing in timings)
    platform = load_platform("h200-sxm-8")
    priced = tables.price_work([product, both], platform)
    alone = platform.gemm(512, 256, 128, dtype="bf16")
    assert priced.alone[0] == pytest.approx(alone.time)
    assert priced.spread[0] == pytest.approx(alone.spread)
    assert priced.alone[1] > priced.alone[0]


def test_ratios_pair_kernels_of_equal_sizes() -> None:
    def time(name: str, k: float, seconds: float) -> tables.Timing:
        return tables.Timing("s", name, "bf16", {"m": 1.0, "k": k}, (seconds, seconds))

    timings = [time("a", 1, 2.0), time("b", 1, 1.0), time("a", 2, 9.0), time("b", 2, 3.0)]
    timings += [time("c", 2, 6.0), time("a", 4, 1.0)]
    assert tables.Ratio("", ("a",), ("b",)).divide(timings, "k") == {1: [2.0], 2: [3.0]}
    assert tables.Ratio("", ("a",), ("b", "c")).divide(timings, "k") == {2: [1.0]}
    assert tables.Ratio("", ("a",), ("b",), {"k": 1}).divide(timings, "k") == {1: [2.0]}


def test_a_survey_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="NVIDIA H200"):
        tables.format_errors(tables.Survey({"device": "toy"}, ()))


def test_softmax_of_the_gallery_holds_for_widths_that_were_not_fitted() -> None:
    survey = tables.read_survey(find_reference("measured", "h200-2.survey.json"))
    held = [
        timing
        for timing in survey.timings
        if timing.name in ("softmax_forward", "softmax_backward")
        and timing.sizes["n"] not in tables.FITTED_WIDTHS
    ]
    platform = load_platform("h200-sxm-8")
    priced = tables.price_work([tables.list_work(timing) for timing in held], platform)
    errors = priced.alone / [timing.seconds for timing in held] - 1
    assert abs(errors).mean() < 0.2
    assert abs(errors.mean()) < 0.05


def test_gpus_of_older_generations_have_no_softmax_of_their_own() -> None:
    key = "rowwise._softmax"
    assert load_platform("h100-sxm-8").kernels[key].kind == "fitted"
    assert load_platform("b200-sxm-8").kernels[key].kind == "assumed"
    assert key not in load_platform("a100-sxm-8").kernels
