"""A GPU cluster calibrated through probes: the plan, devices in files with real times, fits, and the live part."""

import gzip
import itertools
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest

import perfkit as pk
from perfkit.calibration.activity import list_work, time_host
from perfkit.calibration.cluster import plan_probes
from perfkit.ground.files import find_reference
from perfkit.ground.units import Array
from perfkit.measure.folders import Campaign
from perfkit.measure.probes import Probe, list_probes
from perfkit.measure.recordings import Recording
from perfkit.measure.samples import dump
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.gallery import platforms
from perfkit.platform.sources import assemble, fit_curves, fit_gemms
from perfkit.readers.trace import read_kineto

H100, NONE = pk.load_platform("h100-sxm-8"), pl.DataFrame()
GPUS = [name for name in platforms()["name"] if "x" not in name.rpartition("-")[2] and "zen" not in name]
SYSTEMS = {"h100_sxm": "h100-sxm-8", "a100_sxm": "a100-sxm-8"}
pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")


def read_shared(folder: Path, system: str) -> Recording:
    """Products and collectives of the kernel database; of several versions of NCCL the newest."""
    products = pl.read_csv(folder / "gemm" / f"gemm_bf16_{system}.csv")
    sent = pl.read_csv(folder / "nccl" / f"nccl_{system}.csv", infer_schema_length=None)
    version = pl.col("nccl_version_recorded")
    sent = sent.filter(version != "unrecorded").filter(version == version.max())
    return Recording(
        f"kernel database, {system}",
        products.select("m", "n", "k", dtype=pl.lit("bf16"), seconds=pl.col("latency_us_sglang") * 1e-6),
        sent.select(
            "dtype", operation=pl.col("op").replace("alltoall", "all_to_all"), ranks="num_gpus", nodes=1,
            nbytes="message_bytes", seconds=pl.col("latency_us") * 1e-6,
        ).with_columns(pl.col("dtype").replace("half", "fp16")),
    )  # fmt: skip


def read_published(system: str) -> Recording:
    """The excerpt that ships with perfkit."""
    frames = (pl.read_csv(find_reference("published", f"{name}.csv")) for name in ("gemm_bf16", "nccl_curves"))
    return Recording(f"published, {system}", *(frame.filter(system=system) for frame in frames))


# The plan.


@pytest.mark.parametrize("name", GPUS)
def test_a_node_takes_ten_minutes(name: str) -> None:
    base = pk.load_platform(name)
    plan = plan_probes(base)
    assert sum(probe.seconds for probe in plan) < 600
    assert all(1 <= probe.repeats <= 50 and probe.seconds > 0 for probe in plan)
    most = base.device.memory[-1].capacity.value / 4
    assert max(probe.sizes.get("nbytes", 0.0) for probe in plan) <= 1.05 * most


def test_the_plan_covers_formats_sizes_ranks_and_families() -> None:
    plan = list_probes([*H100.device.peaks], memory=80e9, cache=50e6, local=8, nodes=4)
    products = [probe for probe in plan if probe.kind == "gemm"]
    assert {probe.dtype for probe in products} == {"bf16", "fp16", "tf32", "fp32", "fp8"}
    sides = np.array([[probe.sizes[side] for side in "mnk"] for probe in products])
    assert sides.max() > 12000 and sides.min() >= 16 and not np.any(sides % 16)
    kinds = Counter((probe.kind, probe.cold) for probe in plan if probe.stage == "kernels")
    assert kinds.keys() == {(kind, True) for kind in ("gemm", "attention", "convolution", "elementwise",
                                                      "embedding_forward")} | {("elementwise", False)}  # fmt: skip
    tables = [p.sizes["table_rows"] * p.sizes["dim"] * 4 for p in plan if p.kind == "embedding_forward"]
    assert 10e9 < max(tables) <= 20e9
    sent = [probe for probe in plan if probe.stage == "collectives"]
    assert {(probe.ranks, probe.nodes) for probe in sent} == {
        (2, 1), (4, 1), (8, 1), (2, 2), (4, 4), (16, 2), (32, 4),
    }  # fmt: skip
    assert {probe.members for probe in sent if probe.nodes == 2} == {(0, 8), tuple(range(16))}
    sizes = {probe.sizes["nbytes"] for probe in sent}
    assert (min(sizes), max(sizes)) == (2**10, 2**30)
    runs = [probe for probe in plan if probe.stage == "iterations"]
    assert 6 <= len(runs) <= 15 and {probe.variant for probe in runs} == {"eager", "compiled"}
    texts = [json.dumps(asdict(probe)) for probe in plan]
    assert [json.dumps(asdict(Probe(**json.loads(text)))) for text in texts] == texts
    groups = [probe.group for probe in plan]
    assert len([1 for a, b in itertools.pairwise(groups) if a != b]) == len({*groups}) - 1, "in one piece"
    again, other = (list_probes(["bf16"], memory=80e9, cache=50e6, seed=seed)[0] for seed in (0, 1))
    assert again == products[0] != other


# A device in a file.


def test_a_recording_answers_from_the_nearest_time_and_never_twice() -> None:
    times = pl.DataFrame({"m": [64, 64, 80], "n": 512, "k": 512, "dtype": "bf16", "seconds": [3e-6, 5e-6, 6e-6]})
    probe = Probe("kernels", "gemm", "nt", "bf16", {"m": 66, "n": 500, "k": 512})
    wanted = [probe, probe, probe, replace(probe, dtype="fp8"), replace(probe, kind="convolution", sizes={})]
    first, second, *others = Recording("three times", times, NONE).answer(wanted)
    assert first == {"samples": [3e-6, 5e-6], "sizes": {"m": 64.0, "n": 512.0, "k": 512.0}}
    assert second and second["sizes"]["m"] == 80.0 and others == [None] * 3
    with pytest.raises(ValueError, match="no probe was timed; the first failed with: not recorded"):
        pk.calibrate(device=Recording("nothing", NONE, NONE), base=H100)
    with pytest.raises(ValueError, match="base is missing; name the platform most like"):
        pk.calibrate(device=Recording("nothing", NONE, NONE))


def test_the_published_excerpt_becomes_a_platform(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    platform = pk.calibrate(device=read_published("h100_sxm"), base=H100, out=out)
    assert pk.load_platform(out) == platform == pk.calibrate(measurements=tmp_path / "mine.measurements.json", out=out)
    story = platform.provenance
    assert platform.name == "mine" and story["base"] == "h100-sxm-8" and "host" in story["as in the base"].split(", ")
    assert "attention" in story["as in the base"] and "32 of gemm in fp8 (not recorded)" in story["without a time"]
    assert platform.kernels["gemm"].source.startswith("published, h100_sxm")
    assert platform.kernels["attention"] == H100.kernels["attention"] and platform.device == H100.device
    bert = pk.Transformer.bert("bert-large", batch=8, sequence=512, dtype="bf16")
    old, new = (pk.predict(bert, where, ranks=8).time for where in (H100, platform))
    assert new == pytest.approx(old, rel=0.1) and new != old


def hold_out(device: Recording, plan: Sequence[Probe]) -> Recording:
    """What a recording knows beyond its answers to a plan; half precision alone, medians over repeats."""
    answers = [(probe, answer["sizes"]) for probe, answer in zip(plan, device.answer(plan), strict=True) if answer]
    products = pl.DataFrame([sizes for probe, sizes in answers if probe.kind == "gemm"]).cast(pl.Int64)
    sent = [
        {"operation": p.kind, "ranks": p.ranks, "dtype": p.dtype, "nbytes": int(sizes["nbytes"])}
        for p, sizes in answers if p.stage == "collectives"
    ]  # fmt: skip
    keys = ["operation", "ranks", "dtype", "nbytes"]
    rest = device.collectives.filter(dtype="fp16").join(pl.DataFrame(sent), on=keys, how="anti")
    medians = rest.group_by(keys).agg(pl.col("seconds").median()).sort(keys)
    return Recording("held out", device.products.join(products, on=["m", "n", "k"], how="anti"), medians)


def find_errors(platform: pk.Platform, held: Recording) -> dict[str, Array]:
    """predicted / measured - 1 of products of any size, of those with no side under 512, and of collectives."""
    m, n, k, seconds = (held.products[name].to_numpy().astype(float) for name in ("m", "n", "k", "seconds"))
    work = {"flops": gemm_flops(m, n, k), "nbytes": gemm_bytes(m, n, k, itemsize=2)}
    products = platform.kernel_time("gemm", work, dtype="bf16") / seconds - 1
    sent = []
    for (operation, ranks), rows in held.collectives.group_by("operation", "ranks", maintain_order=True):
        nbytes, measured = (rows[name].to_numpy() for name in ("nbytes", "seconds"))
        sent.append(platform.collective_time(str(operation), nbytes, ranks=int(str(ranks))) / measured - 1)
    wide = np.minimum(np.minimum(m, n), k) >= 512
    return {"products": products, "products from 512": products[wide], "collectives": np.concatenate(sent)}


def summarize(error: Array) -> tuple[float, float, float, float]:
    """Mean and 95th percentile of the error, its geometric mean, and its mean with sign [%]."""
    size = 100 * np.abs(error)
    geomean = np.exp(np.log(np.maximum(size, 0.01)).mean())
    return float(size.mean()), float(np.percentile(size, 95)), float(geomean), float(100 * error.mean())


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_plan_predicts_what_it_did_not_time(system: str, shared_data: Path, tmp_path: Path) -> None:
    """Within 1.3 times the errors that fitting every recorded time leaves, those held out included."""
    device, base = read_shared(shared_data, system), pk.load_platform(SYSTEMS[system])
    planned = pk.calibrate(device=device, base=base, out=tmp_path / "planned.toml")
    whole = assemble(
        base, kernels=fit_gemms(device.products, base.device), collectives=fit_curves(device.collectives),
    )  # fmt: skip
    held = hold_out(device, plan_probes(base))
    assert len(held.products) > 2850 and len(held.collectives) > 60
    found, least = (find_errors(platform, held) for platform in (pk.load_platform(tmp_path / "planned.toml"), whole))
    assert planned.kernels["gemm"].n < 100
    for name in found:
        pairs = list(zip(summarize(found[name]), summarize(least[name]), strict=True))
        print(f"{system} {name}, {len(found[name])}:", *(f"{a:.1f} ({b:.1f})" for a, b in pairs))
        assert all(a <= 1.3 * b for a, b in pairs[:2]), name


# The live part, on a CPU with the calls of CUDA replaced.

WORDS = pk.Transformer.bert("bert-base", batch=2, sequence=8, layers=1, hidden=16, heads=2, vocabulary=32)
SMALL = {"m": 32, "n": 32, "k": 32, "batch": 1, "flops": 1.0, "nbytes": 6144.0}
PICTURE = {"rows": 1, "image": 8, "stride": 1, "height": 3, "width": 3, "m": 64, "n": 8, "k": 72, "batch": 1}
LOOKUP = {"lookups": 64, "bags": 8, "dim": 16, "table_rows": 100, "exponent": 0.0, "elements": 1024}
KERNELS = [
    *(Probe("kernels", "gemm", "nt", dtype, SMALL) for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8")),
    *(Probe("kernels", "attention", phase, "bf16", SMALL) for phase in ("forward_causal", "backward")),
    *(Probe("kernels", "convolution", phase, "bf16", {**PICTURE, "nbytes": 1e5}) for phase in ("forward", "backward")),
    Probe("kernels", "elementwise", "add", "bf16", {"elements": 64, "nbytes": 384.0}, cold=False),
    Probe("kernels", "embedding_forward", "_embedding_bag", "fp32", {**LOOKUP, "nbytes": 5e3}),
]
SENT = [
    Probe("collectives", kind, "", dtype, {"nbytes": 4096.0}, members)
    for kind, dtype, members in (("all_reduce", "int8", (0, 1, 2)), ("all_to_all", "fp16", (0, 2)))
]


class Event:
    """An event of a device that takes 2 ms for everything; asked whether it began too soon, it says what it is told."""

    soon: ClassVar[list[bool]] = []

    def __init__(self, enable_timing: bool) -> None:
        self.timed = enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.soon.pop() if self.soon else False

    def elapsed_time(self, other: "Event") -> float:
        return 2.0 if self.timed and other.timed else 0.0


def replace_cuda(cycles: list[int], change: Any = setattr) -> None:
    """Put the calls of CUDA that the live part makes out of action."""
    import torch

    known = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        total_memory=85e9,
        L2_cache_size=2**14,
        multi_processor_count=132,
        clock_rate=1.98e6,
    )
    fakes = {"Event": Event, "_sleep": cycles.append, "get_device_properties": lambda device: known}
    fakes |= dict.fromkeys(("synchronize", "empty_cache"), lambda: None)  # type: ignore[arg-type]
    for name, fake in fakes.items():
        change(torch.cuda, name, fake)


def test_probes_are_timed_by_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from perfkit.measure.cuda import describe_device, time_probes, time_queued

    cycles: list[int] = []
    replace_cuda(cycles, monkeypatch.setattr)
    huge = replace(KERNELS[0], sizes={**SMALL, "m": 2**50})
    jobs = [asdict(replace(probe, repeats=4)) for probe in (*KERNELS, huge)]
    *answers, failed = time_probes(probes=jobs, folder=str(tmp_path), device="cpu:0")
    assert [answer and answer["samples"] for answer in answers] == [[5e-4] * 5] * len(KERNELS)
    assert failed and "memory" in failed["failed"] + "memory" * ("overflow" in failed["failed"])
    assert {*cycles} == {800_000}
    facts = describe_device(device="cpu:0")
    assert (facts["memory"], facts["clock"], facts["memory_clock"]) == (85e9, 1.98e9, 0.0)
    cycles.clear()
    calls: list[int] = []
    for alone, spins in ((True, [1, 4, 16]), (False, [1])):  # where the host was late, the device spins for longer
        Event.soon[:] = [False, True, True]
        assert time_queued([lambda: calls.append(1), lambda: calls.append(2)], 1, alone=alone) == [2e-3] * 5
        assert [*dict.fromkeys(cycles)] == [200_000 * spin for spin in spins]
        cycles.clear()
    Event.soon.clear()
    assert calls[:4] == [1, 2, 1, 2], "each once to warm up, then in turns"


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_an_iteration_is_timed_and_then_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from perfkit.measure.cuda import time_probes

    replace_cuda([], monkeypatch.setattr)
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda step: compiled.append(step) or step)
    runs = [Probe("iterations", "bert-0", how, "fp32", {}, workload=dump(WORDS)) for how in ("eager", "compiled")]
    for found in time_probes(probes=[asdict(p) for p in runs], folder=str(tmp_path), device="cpu:0"):
        assert found and found["seconds"] > 0 and found["profiled"] > 0
        events = json.loads(gzip.decompress(Path(found["trace"]).read_bytes()))["traceEvents"]
        names = Counter(event["name"].partition("#")[0] for event in events if event.get("cat") == "user_annotation")
        assert names["ProfilerStep"] == 6
        assert any("Input Dims" in event.get("args", {}) for event in events), "graphs need shapes"
        assert not any(event.get("cat") == "python_function" for event in events), "Python stacks slow the host"
    assert len(compiled) == 1


LAUNCHED = """
import json, os, sys
from pathlib import Path
from perfkit.calibration import cluster
from perfkit.measure.folders import Campaign
from tests import test_cluster as t
t.replace_cuda([])
cluster.list_probes = lambda *_, **__: [*t.KERNELS[:1], *t.SENT]
folder = Path(sys.argv[1])
first, base = os.environ["RANK"] == "0", cluster.resize_base(t.H100, 3, 1)
kept = Campaign(folder / "kept" if first else None)
found = cluster.measure_cluster(kept, "cpu:0", base, folder=folder / "t", launched=True)
(folder / f"found{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


@pytest.mark.serial
def test_ranks_of_a_launcher_finish_what_rank_0_has_begun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3", "GLOO_SOCKET_IFNAME": "lo"}
    root, finished = Path(__file__).resolve().parent.parent, tmp_path / "kept"
    Campaign(finished).run("probes", {"kernels.gemm": lambda: [[{"samples": [7.0]}], [None], [None]]})
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHED, str(tmp_path)], cwd=root,
            env={**os.environ, **about, "PYTHONPATH": str(root), "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        assert [process.wait(timeout=90) for process in ranks] == [0, 0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    found, *others = (json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(3))
    assert [row["samples"] for row in found["probes"]] == [[7.0], *[[pytest.approx(4e-5, rel=0.2)] * 5] * 2]
    assert [other["probes"] for other in others] == [found["probes"]] * 2
    assert found["facts"]["name"].startswith("NVIDIA H100") and found["ranks_per_node"] == 3
    kept = [json.loads(line)[0] for line in finished.read_text().split("\n") if line]
    assert kept == ["probes.kernels.gemm", "probes.collectives.3-1", "probes.collectives.2-1"]


# What became slower.


@dataclass(frozen=True)
class Imagined(Recording):
    """A device that behaves as a platform says, within 3 %."""

    platform: pk.Platform = H100
    seed: int = 0

    def answer(self, probes: Sequence[Probe]) -> list[dict[str, Any] | None]:
        rng, answers = np.random.default_rng(self.seed), list[dict[str, Any] | None]()
        for probe in probes:
            nbytes, noise = probe.sizes.get("nbytes", 0.0), np.exp(0.03 * rng.standard_normal())
            if probe.stage == "collectives":
                seconds = self.platform.collective_time(probe.kind, nbytes, ranks=probe.ranks)
            elif probe.stage == "kernels":
                kind = probe.kind if probe.kind in self.platform.kernels else "gemm"
                work = {"flops": probe.sizes["flops"], "nbytes": nbytes}
                seconds = self.platform.kernel_time(kind, work, dtype=probe.dtype)
            else:
                answers.append(
                    {"seconds": 0.05, "profiled": 0.1, "trace": self.source} if "resnet" in probe.kind else None
                )
                continue
            answers.append({"samples": [float(seconds * noise)]})
        return answers


def imagine(platform: pk.Platform, seed: int) -> pk.Platform:
    return pk.calibrate(device=Imagined("imagined", NONE, NONE, platform, seed), base=H100)


def test_every_class_that_was_timed_is_fitted() -> None:
    found = imagine(H100, 0)
    timed = {"gemm", "gemm.fp32", "gemm.tf32", "gemm.fp8", "attention", "attention.backward", "convolution",
             "elementwise", "embedding_forward"}  # fmt: skip
    assert {key for key, fit in found.kernels.items() if fit.source.startswith("imagined")} >= timed
    for key, kind in {"gemm": "gemm", "attention": "attention", "attention.backward": "attention"}.items():
        ours, theirs = found.kernels[key], H100.kernels[kind]
        for name in ("compute_efficiency", "memory_efficiency"):
            assert ours[name] == pytest.approx(theirs[name], rel=0.15), (key, name)
    for ranks in (2, 4, 8):
        assert found.collective_time("all_gather", 1e8, ranks=ranks) == pytest.approx(
            H100.collective_time("all_gather", 1e8, ranks=ranks), rel=0.05
        )


def test_the_host_is_as_fast_as_without_the_profiler(shared_data: Path) -> None:
    """A trace of a V100 stands for one under the profiler, which takes twice as long here."""
    path = shared_data / "traces" / "resnet50_v100x1_workers0.json.gz"
    found = pk.calibrate(device=Imagined(str(path), NONE, NONE), base=H100)
    file = read_kineto(path)
    table = time_host(file, list_work(file))
    for name in ("gap", "before_launch", "launch", "between_launches"):
        rows = table.filter(overhead=name)
        mean = float((rows["mean_s"] * rows["n"]).sum() / rows["n"].sum())
        assert found.host[name].value == pytest.approx(mean / 2) and found.host[name].kind == "measured"
    assert found.provenance["profiler"] == "slows eager iterations 2.00 to 2.00 times"
    assert "before_launch.convolution.forward" in found.host and "host" not in found.provenance["as in the base"]
    assert pk.predict(pk.DLRM("dlrm-mlperf", batch=2048), found).time > 0


def test_a_slower_link_or_device_is_named_and_nothing_else() -> None:
    before = imagine(H100, 0)
    assert not len(pk.compare(before, imagine(H100, 1)).changes()), "the same device a month later"
    wire = H100.network.links["intra"].bandwidth.value
    link = pk.compare(before, imagine(H100.with_link("intra", bandwidth=wire / 1.2), 1)).changes()
    assert set(link["group"]) == {"collective"} and link["name"].str.contains("beta").all()
    assert link["slower"].to_list() == pytest.approx([1.2] * len(link), rel=0.06) and len(link) > 10
    fit = H100.kernels["gemm"]
    fits = {**H100.kernels, "gemm": replace(fit, parameters={**fit, "compute_efficiency": 0.65})}
    clocks = pk.compare(before, imagine(replace(H100, kernels=fits), 1)).changes()
    assert set(clocks["group"]) == {"kernel"} and clocks["name"].str.contains("^(gemm|bmm).* compute").all()
