"""Tables of benchmarks/ from saved measurements; nothing is measured and no clock read."""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from benchmarks import accuracy, beside, learning, left_out, peers, placement, scale, speed, traced
from benchmarks import checks as checks_of_a_machine
from benchmarks.accuracy import BARS, evaluate, format_accuracy, judge_kernels
from benchmarks.gpu_steps import join_runs, list_steps
from benchmarks.helpers import calculon
from benchmarks.helpers.saved_runs import pool_checks
from perfkit.calibration.checks import Comparison
from perfkit.exploration.strategies import explore
from perfkit.ground.files import find_reference
from perfkit.measure.kernels import draw_cases
from perfkit.measure.records import read_measurements
from perfkit.measure.samples import draw_check, dump
from perfkit.platform.estimates import ExtrapolationWarning
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.predictor import predict
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]


def make_run(sample: Any, platform: Platform, factor: float, floor: float) -> dict[str, Any]:
    """A saved run that is predicted `factor` times as long as it was measured."""
    prediction = predict(sample.workload, platform, ranks=sample.ranks, plan=sample.plan)
    time = prediction.time
    config = dump(sample.workload)
    if sample.plan:
        config["owners"] = list(sample.plan.owners)
    return {
        "family": sample.family,
        "name": sample.name,
        "config": config,
        "predicted_s": time,
        "low_s": 0.9 * time,
        "high_s": 1.1 * time,
        "measured_s": time / factor,
        "measured_q1_s": time / factor,
        "measured_q3_s": time / factor,
        "ranks": sample.ranks,
        "flagged": False,
        "bottleneck": "x",
        "noise": floor,
    }


@pytest.fixture
def checks(toy: Platform, tmp_path: Path) -> list[Path]:
    """Saved checks whose predictions are 1.05 and 0.8 times what was measured."""
    files = []
    for seed, factor, floor in ((1, 1.05, 0.02), (2, 0.8, 0.04)):
        samples = draw_check(seed, dlrm=2, transformer=1, hybrid=1)
        runs = tuple(make_run(sample, toy, factor, floor) for sample in samples)
        saved = Comparison(runs, "other", {"processor": "x"}, {"perfkit": "0"})
        files.append(saved.save(tmp_path / f"check-{seed}.json"))
    return files


def by_name(*given: Any) -> dict[str, dict[str, Any]]:
    return {row["quantity"]: row for row in evaluate(*given)}


def test_iterations_are_pooled_and_held_against_their_bars(checks: list[Path]) -> None:
    rows = by_name(checks)
    one = rows["iterations, one process"]
    assert one["n"] == 6
    assert one["mean"] == pytest.approx(12.5)
    assert one["bias"] == pytest.approx(-7.5)
    assert one["geomean"] == pytest.approx(10.0)
    assert one["floor"] == pytest.approx(3.0)
    assert one["bar"] == "geomean 10 / mean 12 / p95 30"
    assert not one["met"]
    assert rows["iterations, two ranks"]["met"]
    dlrms = rows["iterations, DLRM"]
    assert dlrms["met"] is None
    assert dlrms["n"] == 4
    inside = rows["inside the 80 % interval"]
    assert inside["mean"] == pytest.approx(50)
    assert not inside["met"]
    assert "collectives, lower quartile" not in rows


def list_kernels(platform: Platform) -> list[dict[str, Any]]:
    """Kernels that a platform takes to be 4 % longer than they are, with halves that differ by 2 %."""
    kernels = []
    for case in draw_cases(3, density=0.2):
        if case.kind in ("gemm", "convolution") and case.sizes["flops"] < 2e6:
            continue
        row = {
            "kind": case.kind,
            "variant": case.variant,
            "sizes": case.sizes,
            "nbytes": 1e6,
            "median": 1.0,
        }
        (error,) = judge_kernels(platform, [row])[f"{case.kind}.{case.variant}"]
        kernels.append({**row, "median": (1 + error) / 1.04, "halves": [1.0, 1.02]})
    return kernels


def list_sweep(q1: float) -> list[dict[str, Any]]:
    """Collectives of four sizes that took equally long [s]."""
    return [{"operation": "all_reduce", "nbytes": 2**size, "q1": q1} for size in range(10, 14)]


@pytest.fixture
def parts(toy: Platform, tmp_path: Path) -> list[Path]:
    """Saved kernels and collectives; sweeps differ by 10 %."""
    sweeps = [list_sweep(1.1e-4), list_sweep(1e-4)]
    kernels = tmp_path / "k.json"
    kernels.write_text(json.dumps({"format": 1, "kernels": list_kernels(toy)}))
    collectives = tmp_path / "c.json"
    collectives.write_text(json.dumps({"format": 1, "collectives": sweeps, "ranks": 2}))
    return [kernels, collectives]


def test_kernels_and_collectives_are_judged(toy: Platform, parts: list[Path]) -> None:
    rows = by_name(parts, toy)
    names = [bar.name for bar in BARS if not bar.name.startswith("iter")]
    assert list(rows) == names
    for name in names[:-1]:
        assert rows[name]["mean"] == pytest.approx(4.0)
        assert rows[name]["floor"] == pytest.approx(2.0)
    collectives = rows[names[-1]]
    assert collectives["n"] == 8
    assert collectives["floor"] == pytest.approx(100 * np.log(1.1), abs=0.01)


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


def test_each_quantity_has_a_line(toy: Platform, parts: list[Path]) -> None:
    rows = evaluate(parts, toy)
    text = format_accuracy(rows)
    assert "geomean 6 / mean 10  yes" in text
    assert len(text.splitlines()) == len(rows) + 1


def test_times_without_predictions_need_a_platform(parts: list[Path]) -> None:
    with pytest.raises(ValueError, match="give the platform with --platform"):
        evaluate(parts)


MACHINE = {"processor": "invented"}


@pytest.fixture
def asked(monkeypatch: Patch) -> list[str]:
    """Parts that were measured, of two that there are."""
    asked: list[str] = []

    def measure_part(name: str) -> dict[str, Any]:
        asked.append(name)
        return {"kernels": []}

    def list_parts(*_: Any, **__: Any) -> dict[str, Any]:
        return {name: partial(measure_part, name) for name in ("kernels-1", "check-1")}

    monkeypatch.setattr(accuracy, "describe_machine", MACHINE.copy)
    monkeypatch.setattr(accuracy, "list_versions", lambda: {"perfkit": "0"})
    monkeypatch.setattr(accuracy, "_list_jobs", list_parts)
    return asked


def test_a_rerun_takes_what_is_kept(toy: Platform, tmp_path: Path, asked: list[str]) -> None:
    here = Platform(toy.name, toy.device, toy.network, provenance=MACHINE)
    for _ in range(2):
        files = accuracy.measure(here, tmp_path / "out.json", seeds=[1], kernel_seed=1)
        assert [file.name for file in files] == ["out.kernels-1.json", "out.check-1.json"]
    assert asked == ["kernels-1", "check-1"]


@pytest.fixture(scope="module")
def measurements() -> dict[str, Any]:
    return json.loads(
        find_reference("measured", "zen5-2.measurements.json").read_text(encoding="utf-8")
    )


def test_what_another_machine_has_measured_is_not_taken(
    toy: Platform, tmp_path: Path, asked: list[str]
) -> None:
    here = Platform(toy.name, toy.device, toy.network, provenance=MACHINE)
    kept = {"format": 1, "machine": {"processor": "y"}, "versions": {"perfkit": "0"}}
    (tmp_path / "out.kernels-1.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="measured on another machine"):
        accuracy.measure(here, tmp_path / "out.json", seeds=[1], kernel_seed=1)


def test_learning_from_nothing_and_from_something(
    checks: list[Path], measurements: dict[str, Any]
) -> None:
    by_class: dict[str, list[Any]] = {}
    for row in measurements["kernels"]:
        by_class.setdefault(f"{row['kind']}.{row['variant']}", []).append(row)
    kernels = list[Any]()
    for rows in by_class.values():
        kernels += rows[:6]
    single = [row for row in measurements["iterations"] if not row["owners"]]
    few = measurements | {"iterations": single[:2] + single[-2:], "kernels": kernels}
    saved = Comparison.load(*checks)
    learnt = learning.learn(read_measurements(few), saved, draws=1, counts=(0,))
    shown = []
    for row in learnt:
        if row["family"] in ("dlrm", "all"):
            shown.append((row["family"], row["iterations"]))
    assert shown == [("dlrm", 0), ("dlrm", 4), ("all", 0), ("all", 4)]
    for row in learnt:
        assert row["q1"] <= row["error"] <= row["q3"]


def find_mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Mean size of errors, which are beside their noise [-]."""
    return float(np.mean([abs(error) for error, _ in pairs]))


@pytest.fixture(scope="module")
def few_kernels(measurements: dict[str, Any]) -> list[Any]:
    """Kernels of embeddings, of one element-wise function and of one kind of product."""
    kernels = []
    for row in measurements["kernels"]:
        if row["kind"].startswith("embedding") or row["variant"] in ("add", "nt"):
            kernels.append(row)
    return kernels


def test_kernels_are_judged_by_fits_without_them(
    measurements: dict[str, Any], few_kernels: list[Any]
) -> None:
    few = measurements | {"kernels": few_kernels, "collectives": []}
    errors = left_out.judge_kernel_folds(read_measurements(few), folds=2, draws=1)
    judged = [len(pairs) for name, pairs in errors.items() if name.startswith("embedding")]
    assert sum(judged) == 215
    assert find_mean(errors["embedding_forward._embedding_bag"]) < 0.15
    assert find_mean(errors["embedding_update.sparse"]) < 0.28


def test_embeddings_of_iterations_are_judged_by_the_other_iterations(
    measurements: dict[str, Any], few_kernels: list[Any]
) -> None:
    tabled = []
    for row in measurements["iterations"]:
        if len(row["runs"]) == 1 and row["workload"].get("tables"):
            tabled.append(row)
    few = measurements | {"kernels": few_kernels, "collectives": [], "iterations": tabled[2:5]}
    errors = left_out.judge_embeddings(read_measurements(few))
    assert list(errors) == ["time", "share"]
    for pairs in errors.values():
        assert len(pairs) == 3
        for error, noise in pairs:
            assert abs(error) < 0.8
            assert noise >= 0


def test_speed_lists_jobs_that_run(toy: Platform) -> None:
    jobs = speed.list_jobs([toy])
    # to read an installed database, and traces that are not committed
    bars = {job.bar for job in jobs} - {3.0, 1.5}
    assert bars == {0.5, 0.05, 5e-3, 1e-5, 2e-5, 1e-4 / 3, 1e-6, 1.0, 2.0, 5.0, 10.0}
    for job in jobs:
        if not job.slow:
            next(job.calls)()


def test_speed_lists_a_large_trace_that_is_analysed(tmp_path: Path) -> None:
    read, analyse, record = speed.list_large_traces(tmp_path, share=0.002)
    assert len(next(read.calls)().files[0].events) == 301
    assert "100 operations" in next(analyse.calls)()
    graph, seconds = next(record.calls)()
    assert [label.name for label in graph.labels] == ["mm"] * 100
    assert seconds == pytest.approx(np.full(100, 9e-6))


def test_speed_lists_large_logs_that_are_read(tmp_path: Path) -> None:
    jobs = list(speed.list_large_logs(tmp_path, share=0.006))
    results = [next(job.calls)() for job in jobs]
    assert [len(rows) for rows in results[:3]] == [1200, 1080, 1080]  # two halves of each row
    assert all(result.collectives["all_reduce.8"].n > 2 for result in results[3:])


@pytest.fixture(scope="module")
def questions() -> dict[str, list[Any]]:
    """What another tool was asked, by kind: all questions, and then the one whose answer is shown."""
    return {"configurations": [], "strategies": []}


@pytest.fixture(scope="module")
def peer_rows(questions: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows of perfkit and of another tool, which answers with a thousandth of the first number."""

    def ask(kind: str, asked: Sequence[Any]) -> list[float]:
        questions[kind].append(list(asked))
        return [1e-3 * question[0] for question in asked]

    ours = {"configurations": peers._ask_perfkit, "strategies": peers.ask_strategies}
    another = {kind: partial(ask, kind) for kind in ours}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        patch.setattr(peers, "_MANY", 50)
        return peers.time_peers({"perfkit": ours, "another": another}, rounds=1)


def test_peers_are_asked_what_perfkit_is(
    peer_rows: list[dict[str, Any]], questions: dict[str, list[Any]]
) -> None:
    configurations, shown = questions["configurations"]
    assert set(configurations) < set(product(range(1, 101), range(128, 1024, 16)))
    assert shown == [(8, 512)]
    strategies, shown = questions["strategies"]
    for tp, pp, micro in strategies:
        assert 1024 % (tp * pp) == 0
        assert 1536 % (1024 // (tp * pp) * micro) == 0
    assert shown == [(8, 8, 1)]


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


def test_answers_of_peers_are_shown(peer_rows: list[dict[str, Any]]) -> None:
    for row in peer_rows[1::2]:
        assert row["name"] == "another"
        assert row["answer_s"] == 8e-3
    assert len(peer_rows) == 4


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
def test_perfkit_answers_peers_as_it_predicts(peer_rows: list[dict[str, Any]]) -> None:
    gpt = Transformer.gpt2(batch=8, sequence=512, dtype="bf16")
    prediction = predict(gpt, load_platform("a100-sxm-8"))
    assert peer_rows[0]["answer_s"] == pytest.approx(prediction.time)
    large = Transformer.preset("gpt3-175b", batch=1536, dtype="bf16", mixed=True, fused=True)
    strategy = Strategy(tp=8, pp=8, dp=16, zero=1, sequence_parallel=True)
    explored = explore(large, "a100-sxm-8x128", strategies=[strategy], memory=1e12)
    assert peer_rows[2]["answer_s"] == pytest.approx(explored.table()["time_s"][0])


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
def test_strategies_are_timed_again_and_again_and_unlike() -> None:
    timed = scale.time_strategies(rounds=1)
    assert [row["count"] for row in timed] == [100_000, 7268, 41_902]
    for row in timed:
        assert row["per_second"] > 0


def test_a_machine_without_committed_checks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"machine is 'zen33'; .* of .*, xeon-2, zen3-2, zen5-2$"):
        pool_checks("zen33")


def test_steps_of_gpus_are_no_samples_of_check(capsys: Capture) -> None:
    assert checks_of_a_machine.main(["h100-1"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "runs of 'h100-1' are of families bert" in said
    assert "benchmarks.gpu_steps --saved" in said


def test_peers_that_cannot_be_installed_are_told(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(peers.subprocess, "run", lambda words: SimpleNamespace(returncode=1))
    assert peers.main([]) == 0
    assert "nothing is compared" in capsys.readouterr().out


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """A checkout of something that looks like Calculon."""
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems" / "a100_80g.json").write_text("{}")
    (tmp_path / "calculon.py").write_text(_STAND_IN)
    monkeypatch.setattr(calculon.sys, "path", [*calculon.sys.path])
    yield tmp_path
    calculon.sys.modules.pop("calculon", None)


def test_calculon_is_asked_in_a_checkout(checkout: Path) -> None:
    ask = calculon.load_calculon(checkout)
    gpt = Transformer.preset("gpt3-175b", batch=64, dtype="bf16", mixed=True, fused=True)
    strategy = Strategy(
        tp=8,
        pp=8,
        dp=2,
        schedule="interleaved",
        chunks=3,
        checkpoint="selective",
        sequence_parallel=True,
    )
    assert ask(gpt, strategy) == 2.0
    assert np.isnan(ask(gpt, replace(strategy, checkpoint="none")))
    ((application, execution),) = calculon.import_module("calculon").given
    assert application == {
        "hidden": 12288,
        "feedforward": 49152,
        "seq_size": 2048,
        "attn_heads": 96,
        "attn_size": 128,
        "num_blocks": 96,
    }
    assert execution["num_procs"] == 128
    assert execution["pipeline_interleaving"] == 3
    assert execution["pipeline_par_net"] == 1
    assert execution["tensor_par_comm_type"] == "rs_ag"
    assert execution["seq_par_ag_redo"] is True
    assert execution["optimizer_sharding"] is False


def test_a_folder_that_is_no_checkout_of_calculon_is_refused(checkout: Path) -> None:
    with pytest.raises(ValueError, match="name a checkout of Calculon"):
        calculon.load_calculon(checkout / "systems")


METHODS = {
    "search",
    "search-whole",
    "random",
    "size",
    "lookup",
    "size-lookup",
    "unique-rows",
    "storage",
}


def test_placements_are_summarized_over_seeds() -> None:
    case = placement.Case(20, 4, huge=True, speedup=np.inf)
    rows = list[Any]()
    for seed in (3, 4):
        rows += placement.run_case(case, seed, seconds=0.02)
    summary = placement.summarize(case, rows)
    shown = {(row["objective"], row["method"]) for row in summary}
    assert shown == set(product(("additive", "iteration"), METHODS))
    for row in summary:
        members = [
            member
            for member in rows
            if member["objective"] == row["objective"] and member["method"] == row["method"]
        ]
        assert row["time"] == pytest.approx(np.mean([member["time_s"] for member in members]))
        assert row["case"] == "20 × 4, one huge"
        assert row["worst"] == max(member["gap"] for member in members)
        assert row["worst"] >= row["gap"] >= 0
        met = False if row["method"] == "search" else None
        assert row.get("met") is met, "no search is infinitely faster"


def test_steps_of_gpus_have_names_of_their_own() -> None:
    names = [step.name for step in (*list_steps("first"), *list_steps("second"))]
    assert len(names) == len({*names}) == 45


def make_timing(name: str, median: float) -> dict[str, Any]:
    """A step of a GPU that was timed."""
    times = {"median": 2.0, "q1": 1.9, "q3": 2.2}
    in_a_row = {**times, "median": median}
    return {"name": name, "in_a_row": in_a_row, "one_by_one": times, "peak": 5.0, "reserved": 6.0}


def make_prediction(name: str) -> dict[str, Any]:
    """A step of a GPU that was predicted."""
    times = {"predicted_s": 2.0, "low_s": 1.0, "high_s": 3.0}
    return {"name": name, "family": "bert", "bottleneck": "x", **times}


def test_steps_of_gpus_are_joined_by_name_and_failures_left_out() -> None:
    rows = [make_prediction(name) for name in ("a", "b", "c")]
    predicted = {"platform": "p", "date": "d", "rows": rows}
    timed = [make_timing("a", 2.0), make_timing("a", 3.0), {"name": "b", "failed": "?"}]
    measured = {"device": "g", "machine": {}, "versions": {}, "rows": timed}
    (run,) = join_runs(predicted, measured).runs
    assert run["name"] == "a"
    assert run["measured_s"] == 2.5
    assert run["noise"] == 0.5
    assert run["peak"] == 5.0
    later = {**measured, "rows": [make_timing("a", 4.0)]}
    (run,) = join_runs(predicted, measured, later).runs
    assert run["measured_s"] == 3.0, "another process is another pass"
    assert run["noise"] == 1.0


def test_traces_of_others_that_are_not_here_are_told_in_one_line(
    monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("PERFKIT_SHARED_DATA", "nowhere")
    assert traced.main([]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("traced: ")
    assert "name the folder" in told
    assert "\n" not in told


def test_collectives_of_traces_are_judged_call_by_call() -> None:
    """Fitted to one of two equal calls the other is hit; both calls of the gallery are twice as
    long as predicted."""
    base = load_platform("a100-sxm-8")
    time = 2 * base.collective("all_reduce", 1e8, ranks=8).time
    call = {
        "iteration": 1,
        "group": "0, 1, 2, 3, 4, 5, 6, 7",
        "operation": "all_reduce",
        "ranks": 8,
        "matched": 8,
        "members": list(range(8)),
        "even_bytes": 1e8,
        "transfer_s": time,
    }
    first = pl.DataFrame([{**call, "order": 0}])
    second = pl.DataFrame([{**call, "order": 1}])
    errors, inside = traced.find_errors(base, pl.concat([first, second]))
    assert errors == pytest.approx([0.5, 0.5])
    assert inside == 0
    row = traced.judge_collectives("a100-sxm-8", [(first, second)])
    assert row["n"] == 1
    assert row["gallery"] == pytest.approx(50)
    assert row["error"] < 30


def test_calls_of_two_commits_take_turns(tmp_path: Path, monkeypatch: Patch) -> None:
    names = ["import_perfkit", "predict_same_workload"]
    monkeypatch.setattr(beside, "CALLS", {name: beside.CALLS[name] for name in names})
    checkouts = [beside.ROOT, beside.ROOT]
    seconds = beside.time_calls(checkouts, [tmp_path / "before", tmp_path / "now"], rounds=2)
    assert list(seconds) == names
    for before, now in seconds.values():
        assert len(before) == len(now) == 2
        assert min(*before, *now) > 0


def test_medians_of_two_commits_are_shown_with_their_ratio() -> None:
    table = beside.format_times({"known": [[0.002, 0.004, 0.3], [0.002, 0.001, 0.008]]}, "abc")
    assert table.splitlines()[-1].split() == ["known", "4", "ms", "2", "ms", "0.50"]


@pytest.mark.repository
def test_a_commit_that_git_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"commit is 'nowhere'; git says .*; take one of git log"):
        beside.unpack("nowhere", tmp_path)
