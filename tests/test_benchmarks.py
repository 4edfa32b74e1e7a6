"""Tables of benchmarks/ from saved measurements; nothing is measured and no clock read."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from benchmarks import accuracy, beside, learning, left_out, peers, placement, scale, speed, traced
from benchmarks.accuracy import BARS, evaluate, format_accuracy, judge_kernels
from benchmarks.gpu_steps import join_runs, list_steps
from benchmarks.helpers import calculon
from perfkit.calibration.checks import Comparison
from perfkit.exploration.strategies import explore
from perfkit.ground.files import find_reference
from perfkit.measure.kernels import draw_cases
from perfkit.measure.records import read_measurements
from perfkit.measure.samples import draw_check, dump
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.predictor import predict
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]


@pytest.fixture
def checks(toy: Platform, tmp_path: Path) -> list[Path]:
    """Saved checks whose predictions are 1.05 and 0.8 times what was measured."""
    files = []
    for seed, factor, floor in ((1, 1.05, 0.02), (2, 0.8, 0.04)):
        runs: list[dict[str, Any]] = []
        for sample in draw_check(seed, dlrm=2, transformer=1, hybrid=1):
            time = predict(sample.workload, toy, ranks=sample.ranks, plan=sample.plan).time
            owners = {"owners": list(sample.plan.owners)} if sample.plan else {}
            about = {
                "family": sample.family,
                "name": sample.name,
                "config": dump(sample.workload) | owners,
            }
            measured = dict.fromkeys(
                ("measured_s", "measured_q1_s", "measured_q3_s"), time / factor
            )
            times = {"predicted_s": time, "low_s": 0.9 * time, "high_s": 1.1 * time, **measured}
            more = {"ranks": sample.ranks, "flagged": False, "bottleneck": "x", "noise": floor}
            runs.append({**about, **times, **more})
        saved = Comparison(tuple(runs), "other", {"processor": "x"}, {"perfkit": "0"})
        files.append(saved.save(tmp_path / f"check-{seed}.json"))
    return files


def by_name(*given: Any) -> dict[str, dict[str, Any]]:
    return {row["quantity"]: row for row in evaluate(*given)}


def test_iterations_are_pooled_and_held_against_their_bars(checks: list[Path]) -> None:
    rows = by_name(checks)
    one, two, inside = (
        rows[name]
        for name in ("iterations, one process", "iterations, two ranks", "inside the 80 % interval")
    )
    assert (one["n"], one["mean"], one["bias"]) == (6, pytest.approx(12.5), pytest.approx(-7.5))
    assert (one["geomean"], one["floor"]) == pytest.approx((10.0, 3.0))
    assert one["bar"] == "geomean 10 / mean 12 / p95 30" and not one["met"] and two["met"]
    assert rows["iterations, DLRM"]["met"] is None and rows["iterations, DLRM"]["n"] == 4
    assert inside["mean"] == pytest.approx(50) and not inside["met"]
    assert "collectives, lower quartile" not in rows


def test_kernels_and_collectives_are_judged(toy: Platform, tmp_path: Path) -> None:
    kernels = []
    for case in draw_cases(3, density=0.2):
        if case.kind not in ("gemm", "convolution") or case.sizes["flops"] >= 2e6:
            row = {
                "kind": case.kind,
                "variant": case.variant,
                "sizes": case.sizes,
                "nbytes": 1e6,
                "median": 1.0,
            }
            (error,) = judge_kernels(toy, [row])[f"{case.kind}.{case.variant}"]
            kernels.append({**row, "median": (1 + error) / 1.04, "halves": [1.0, 1.02]})
    sweep = [
        {"operation": "all_reduce", "nbytes": 2**size, "q1": 1e-4 * 1.1} for size in range(10, 14)
    ]
    other = [{**row, "q1": 1e-4} for row in sweep]
    files = [tmp_path / "k.json", tmp_path / "c.json"]
    for file, part in zip(
        files, ({"kernels": kernels}, {"collectives": [sweep, other], "ranks": 2}), strict=True
    ):
        file.write_text(json.dumps({"format": 1, **part}))
    rows = by_name(files, toy)
    *bars, last = [bar.name for bar in BARS if not bar.name.startswith("iter")]
    assert list(rows) == [*bars, last]
    assert all((rows[n]["mean"], rows[n]["floor"]) == pytest.approx((4.0, 2.0)) for n in bars)
    assert rows[last]["n"] == 8 and rows[last]["floor"] == pytest.approx(
        100 * np.log(1.1), abs=0.01
    )
    text = format_accuracy([*rows.values()])
    assert "geomean 6 / mean 10  yes" in text and len(text.splitlines()) == len(rows) + 1
    with pytest.raises(ValueError, match="give the platform with --platform"):
        evaluate(files)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "platform is missing"),
        ("--platform h100-smx-8", "did you mean 'h100-sxm-8'"),
        ("--platform h100-sxm-8", "was calibrated on no machine"),
        ("--platform toy.toml --kernel-seed 0", "the sizes that calibration has fitted"),
        ("--platform toy.toml --seeds 1,-2", "seeds is -2"),
        ("--from nowhere.json", "nowhere.json"),
        ("--from other.json", "has no kernels, collectives or runs"),
    ],
)
def test_wrong_arguments_of_accuracy_are_told_in_one_line(
    line, message, toy, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accuracy, "describe_machine", lambda: {"processor": "invented"})
    Platform(toy.name, toy.device, toy.network, provenance={"processor": "invented"}).save(
        "toy.toml"
    )
    (tmp_path / "other.json").write_text('{"format": 1}')
    assert accuracy.main(line.split()) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("accuracy: ") and message in told and "\n" not in told


def test_a_rerun_takes_what_is_kept(toy: Platform, tmp_path: Path, monkeypatch: Patch) -> None:
    machine, asked = {"processor": "invented"}, []

    def jobs(*_: Any, **__: Any) -> dict[str, Any]:
        return {
            name: lambda name=name: asked.append(name) or {"kernels": []}
            for name in ("kernels-1", "check-1")
        }

    answers = {
        "describe_machine": lambda: machine,
        "list_versions": lambda: {"perfkit": "0"},
        "_list_jobs": jobs,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(accuracy, name, answer)
    here = Platform(toy.name, toy.device, toy.network, provenance=machine)
    for _ in range(2):
        files = accuracy.measure(here, tmp_path / "out.json", seeds=[1], kernel_seed=1)
        assert [file.name for file in files] == ["out.kernels-1.json", "out.check-1.json"]
    assert asked == ["kernels-1", "check-1"]
    files[0].write_text(
        json.dumps({"format": 1, "machine": {"processor": "y"}, "versions": {"perfkit": "0"}})
    )
    with pytest.raises(ValueError, match="measured on another machine"):
        accuracy.measure(here, tmp_path / "out.json", seeds=[1], kernel_seed=1)


@pytest.fixture(scope="module")
def measurements() -> dict[str, Any]:
    return json.loads(
        find_reference("measured", "zen5-2.measurements.json").read_text(encoding="utf-8")
    )


def test_learning_from_nothing_and_from_something(
    checks: list[Path], measurements: dict[str, Any]
) -> None:
    single, by_class = [row for row in measurements["iterations"] if not row["owners"]], {}
    for row in measurements["kernels"]:
        by_class.setdefault(f"{row['kind']}.{row['variant']}", []).append(row)
    kernels = [row for rows in by_class.values() for row in rows[:6]]
    few = measurements | {"iterations": single[:2] + single[-2:], "kernels": kernels}
    rows = learning.learn(read_measurements(few), Comparison.load(*checks), draws=1, counts=(0,))
    found = [(row["family"], row["iterations"]) for row in rows if row["family"] in ("dlrm", "all")]
    assert found == [*product(("dlrm", "all"), (0, 4))]
    assert all(row["q1"] <= row["error"] <= row["q3"] for row in rows)


def test_kernels_are_judged_by_fits_without_them(measurements: dict[str, Any]) -> None:
    kernels = [
        r
        for r in measurements["kernels"]
        if r["kind"].startswith("embedding") or r["variant"] in ("add", "nt")
    ]
    few = measurements | {"kernels": kernels, "collectives": []}
    found = left_out.judge_kernel_folds(read_measurements(few), folds=2, draws=1)
    assert sum(len(pairs) for key, pairs in found.items() if key.startswith("embedding")) == 215
    for key, most in (
        ("embedding_forward._embedding_bag", 0.15),
        ("embedding_update.sparse", 0.28),
    ):
        assert np.mean([abs(error) for error, _ in found[key]]) < most
    tabled = [
        row for row in few["iterations"] if len(row["runs"]) == 1 and row["workload"].get("tables")
    ]
    found = left_out.judge_embeddings(read_measurements(few | {"iterations": tabled[2:5]}))
    assert {name: len(pairs) for name, pairs in found.items()} == {"time": 3, "share": 3}
    assert all(
        abs(error) < 0.8 and noise >= 0 for pairs in found.values() for error, noise in pairs
    )


def test_speed_lists_jobs_that_run(toy: Platform) -> None:
    jobs = speed.list_jobs([toy])
    # to read an installed database, and traces that are not committed
    known = {job.bar for job in jobs} - {3.0, 1.5}
    assert known == {0.5, 0.05, 5e-3, 1e-5, 2e-5, 1e-4 / 3, 1e-6, 1.0, 2.0}
    for job in jobs:
        if not job.slow:
            next(job.calls)()


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
def test_peers_are_asked_what_perfkit_is(monkeypatch: Patch, capsys: Capture) -> None:
    asked: list[list[tuple[int, ...]]] = []

    def ask(questions: Any) -> list[float]:
        asked.append(list(questions))
        return [1e-3 * first for first, *_ in questions]

    ours = {"configurations": peers._ask_perfkit, "strategies": peers.ask_strategies}
    monkeypatch.setattr(peers, "_MANY", 50)
    rows = peers.time_peers({"perfkit": ours, "another": dict.fromkeys(ours, ask)}, rounds=1)
    assert set(asked[0]) < {*product(range(1, 101), range(128, 1024, 16))} and asked[2:] == [
        [(8, 512)],
        [(8, 8, 1)],
    ]
    assert all(
        1024 % (tp * pp) == 0 and 1536 % (1024 // (tp * pp) * micro) == 0
        for tp, pp, micro in asked[1]
    )
    assert [(row["name"], row["answer_s"]) for row in rows[1::2]] == [("another", 8e-3)] * 2
    gpt = predict(
        Transformer.gpt2(batch=8, sequence=512, dtype="bf16"), load_platform("a100-sxm-8")
    )
    assert rows[0]["answer_s"] == pytest.approx(gpt.time)
    large = Transformer.preset("gpt3-175b", batch=1536, dtype="bf16", mixed=True, fused=True)
    ways = Strategy(tp=8, pp=8, dp=16, zero=1, sequence_parallel=True)
    best = explore(large, "a100-sxm-8x128", strategies=[ways], memory=1e12).table()["time"][0]
    assert rows[2]["answer_s"] == pytest.approx(best)
    timed = scale.time_strategies(rounds=1)
    assert [row["count"] for row in timed] == [100_000, 4808, 28_904] and all(
        row["per_second"] > 0 for row in timed
    )
    monkeypatch.setattr(peers.subprocess, "run", lambda words: SimpleNamespace(returncode=1))
    assert peers.main([]) == 0 and "nothing is compared" in capsys.readouterr().out


_STAND_IN = """
from types import SimpleNamespace

class System(SimpleNamespace):
    def __init__(self, facts):
        super().__init__(get_network=lambda tier: SimpleNamespace(size=8))

class Llm:
    Error = KeyError
    Execution = SimpleNamespace(from_json=lambda ways: ways)

    def __init__(self, app, log):
        self.app, self.log = app, log

    def Application(app):
        return app

    def compile(self, where, ways):
        self.ways = ways

    def run(self, where):
        self.log.debug("%s", self.app)
        if self.ways["activation_recompute"] == "none":
            raise self.Error("does not fit")

    def get_total_time(self):
        given.append((self.app, self.ways))
        return 2.0

given = []
"""


def test_calculon_is_asked_in_a_checkout(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems" / "a100_80g.json").write_text("{}")
    (tmp_path / "calculon.py").write_text(_STAND_IN)
    monkeypatch.setattr(calculon.sys, "path", [*calculon.sys.path])
    ask = calculon.load_calculon(tmp_path)
    gpt = Transformer.preset("gpt3-175b", batch=64, dtype="bf16", mixed=True, fused=True)
    own = Strategy(
        tp=8,
        pp=8,
        dp=2,
        schedule="interleaved",
        chunks=3,
        checkpoint="selective",
        sequence_parallel=True,
    )
    assert ask(gpt, own) == 2.0 and np.isnan(ask(gpt, replace(own, checkpoint="none")))
    ((app, ways),) = calculon.import_module("calculon").given
    assert app == {
        "hidden": 12288,
        "feedforward": 49152,
        "seq_size": 2048,
        "attn_heads": 96,
        "attn_size": 128,
        "num_blocks": 96,
    }
    assert [
        ways[key]
        for key in (
            "num_procs",
            "pipeline_interleaving",
            "pipeline_par_net",
            "tensor_par_comm_type",
            "seq_par_ag_redo",
            "optimizer_sharding",
        )
    ] == [128, 3, 1, "rs_ag", True, False]
    with pytest.raises(ValueError, match="name a checkout of Calculon"):
        calculon.load_calculon(tmp_path / "systems")
    calculon.sys.modules.pop("calculon")


def test_placements_are_summarized_over_seeds() -> None:
    case = placement.Case(20, 4, huge=True, speedup=np.inf)
    rows = [row for seed in (3, 4) for row in placement.run_case(case, seed, seconds=0.02)]
    methods = {
        "search",
        "search-whole",
        "random",
        "size",
        "lookup",
        "size-lookup",
        "unique-rows",
        "storage",
    }
    found = {(row["objective"], row["method"]): row for row in placement.summarize(case, rows)}
    assert {*found} == {*product(("additive", "iteration"), methods)}
    for (objective, method), row in found.items():
        own = [r for r in rows if (r["objective"], r["method"]) == (objective, method)]
        assert (
            row["time"] == pytest.approx(np.mean([r["time_s"] for r in own]))
            and row["case"] == "20 × 4, one huge"
        )
        assert row["worst"] == max(r["gap"] for r in own) >= row["gap"] >= 0
        assert row.get("met") is (False if method == "search" else None), (
            "no search is infinitely faster"
        )


def test_steps_of_gpus_are_joined_by_name_and_failures_left_out() -> None:
    names = [step.name for step in (*list_steps("first"), *list_steps("second"))]
    assert len(names) == len({*names}) == 45
    times = {"median": 2.0, "q1": 1.9, "q3": 2.2}
    timed = {"name": names[0], "in_a_row": times, "one_by_one": times, "peak": 5.0, "reserved": 6.0}
    again = {**timed, "in_a_row": {**times, "median": 3.0}}
    later = {**timed, "in_a_row": {**times, "median": 4.0}}
    about = {"predicted_s": 2.0, "low_s": 1.0, "high_s": 3.0, "family": "bert", "bottleneck": "x"}
    predicted = {
        "platform": "p",
        "date": "d",
        "rows": [{"name": name, **about} for name in names[:3]],
    }
    measured = {
        "device": "g",
        "machine": {},
        "versions": {},
        "rows": [timed, again, {"name": names[1], "failed": "?"}],
    }
    (run,) = join_runs(predicted, measured).runs
    assert (run["name"], run["measured_s"], run["noise"], run["peak"]) == (names[0], 2.5, 0.5, 5.0)
    (run,) = join_runs(predicted, measured, {**measured, "rows": [later]}).runs
    assert (run["measured_s"], run["noise"]) == (3.0, 1.0), "another process is another pass"


def test_traces_of_others_that_are_not_here_are_told_in_one_line(
    monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("PERFKIT_SHARED_DATA", "nowhere")
    assert traced.main([]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("traced: ") and "name the folder" in told and "\n" not in told


def test_collectives_of_traces_are_judged_call_by_call() -> None:
    """Fitted to one of two equal calls the other is hit; both calls of the gallery are twice as
    long as predicted."""
    base = load_platform("a100-sxm-8")
    time = 2 * base.collective("all_reduce", 1e8, ranks=8).time
    about = {
        "iteration": 1,
        "group": "0, 1, 2, 3, 4, 5, 6, 7",
        "operation": "all_reduce",
        "ranks": 8,
        "matched": 8,
    }
    rows = [
        {**about, "members": [*range(8)], "order": order, "even": 1e8, "transfer_s": time}
        for order in (0, 1)
    ]
    errors, inside = traced.find_errors(base, pl.DataFrame(rows))
    assert errors == pytest.approx([0.5, 0.5]) and inside == 0
    row = traced.judge_collectives("a100-sxm-8", [(pl.DataFrame(rows[:1]), pl.DataFrame(rows[1:]))])
    assert (row["n"], row["gallery"]) == (1, pytest.approx(50)) and row["error"] < 30


def test_calls_of_two_commits_take_turns(tmp_path: Path, monkeypatch: Patch) -> None:
    names = ("import_perfkit", "predict_same_workload")
    monkeypatch.setattr(beside, "CALLS", {name: beside.CALLS[name] for name in names})
    seconds = beside.time_calls(
        [beside.ROOT] * 2, [tmp_path / "before", tmp_path / "now"], rounds=2
    )
    assert [*seconds] == [*names]
    assert all(len(times) == 2 and min(times) > 0 for both in seconds.values() for times in both)
    table = beside.format_times({"known": [[0.002, 0.004, 0.3], [0.002, 0.001, 0.008]]}, "abc")
    assert table.splitlines()[-1].split() == ["known", "4", "ms", "2", "ms", "0.50"]


@pytest.mark.repository
def test_a_commit_that_git_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"commit is 'nowhere'; git says .*; take one of git log"):
        beside.unpack("nowhere", tmp_path)
