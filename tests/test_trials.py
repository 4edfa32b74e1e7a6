"""Trials of placements: what is drawn and proposed, what becomes of measured times, and the command around them."""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import sharding_study
from perfkit.__main__ import main
from perfkit.measure import runner
from perfkit.measure.machine import count_cores, describe_machine
from perfkit.measure.runner import MeasurementError, run_processes
from perfkit.platform import Platform
from perfkit.prediction.cost import price
from perfkit.resources import find_reference
from perfkit.sharding.planner import price_plan
from perfkit.trials import experiment
from perfkit.trials.contenders import METHODS, draw_models, make_model, propose_plans
from perfkit.trials.experiment import forecast_plan, measure_trials, predict_again
from perfkit.trials.outcome import Trials
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.samples import dump, load
from perfkit.workloads.tables import EmbeddingTable, TableSet

TINY = DLRM(rows=[100, 50, 20], dim=8, pooling=[2, 1, 3.5], bottom=[8], top=[8], features=4, batch=8)
Factor = Callable[[Plan, int], float]


def pretend(platform: Platform, factor: Factor, jobs: list[dict[str, Any]]) -> Callable[..., Any]:
    """A machine that takes `factor` times what is predicted, and inside iterations what operations are priced at."""

    def run(job: dict[str, Any], *, ranks: int) -> list[Any]:
        jobs.append(job)
        model: Any = load(job["workload"])
        number = sum(other["workload"] == job["workload"] for other in jobs) - 1
        out: list[list[Any]] = [[] for _ in range(ranks)]
        for owners in job["placements"]:
            plan = Plan.from_owners(owners, ranks=ranks)
            time = factor(plan, number) * price_plan(model, platform, plan).time
            for rank, graph in enumerate(model.graphs(ranks, plan)):
                inside = price(graph, platform).seconds.copy()
                inside[graph.collectives] = 1e-4 * (rank + 1)
                timing = {"median": time - 1e-6 * rank, "q1": 0.9 * time, "q3": 1.1 * time, "rounds": [time], "n": 1}
                out[rank].append({**timing, "operation_seconds": inside.tolist()})
        return out

    return run


@pytest.fixture
def study(toy: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Trials, list[Any]]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "count_cores", lambda: 2)
    where = replace(toy, provenance={"processor": describe_machine()["processor"]})

    def run(factor: Factor = lambda plan, number: 1.0, **more: Any) -> tuple[Trials, list[Any]]:
        jobs: list[dict[str, Any]] = []
        monkeypatch.setattr(experiment, "run_processes", pretend(where, factor, jobs))
        return measure_trials(where, progress=False, **{"quick": True, **more}), jobs

    return run


def test_models_are_always_the_same_and_within_what_is_promised() -> None:
    models = draw_models(12)
    assert draw_models(3) == {name: models[name] for name in ("model 0", "model 1", "model 2")}
    assert draw_models(2, seed=1)["model 0"] != models["model 0"]
    for number, model in enumerate(models.values()):
        assert 8 <= len(model.tables) <= 16 and model.sparse == (number % 4 != 3)
        assert all(999 <= table.rows <= 1_000_001 and 1 <= table.pooling <= 64 for table in model.tables)
        assert sum(table.nbytes for table in model.tables) <= (3e8 if model.sparse else 1e8)
        assert 256 <= model.batch <= 2048 and model.batch % 2 == 0
        assert len({table.pooling for table in model.tables}) > 4, "tables differ, or there is nothing to choose"
    for bad in (0, -1, 2.5):
        with pytest.raises(ValueError, match="n is"):
            draw_models(bad)  # type: ignore[arg-type]


def test_every_method_proposes_whole_tables_under_equal_names_of_ranks(toy: Platform) -> None:
    plans = propose_plans(draw_models(1)["model 0"], toy)
    assert tuple(plans) == METHODS and len(METHODS) == 8
    assert all(plan.is_table_wise and plan.ranks == 2 and plan.owners[0] == 0 for plan in plans.values())
    assert plans["random"] != plans["random 2"]
    times = {name: price_plan(draw_models(1)["model 0"], toy, plan).time for name, plan in plans.items()}
    assert times["search"] == pytest.approx(min(times.values()), rel=1e-9)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            TableSet((EmbeddingTable(10, 8), EmbeddingTable(10, 16)), batch=8),
            "dim is 8, 16; a measured DLRM has tables",
        ),
        (TableSet((EmbeddingTable(10, 8),), batch=8, optimizer="adam"), "trained by adam; only sgd on separate fp32"),
        (TableSet((EmbeddingTable(10, 8, itemsize=2),), batch=8), "of 2 bytes a number"),
        (
            TableSet((EmbeddingTable(10, 8, law=EmbeddingTable(10, 8).distribution),), batch=8),
            "law of a table is given",
        ),
    ],
)
def test_tables_that_cannot_be_measured_are_turned_away(tables: TableSet, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(tables)


def test_tables_become_a_model() -> None:
    tables = TableSet((EmbeddingTable(10, 8, 2.0, 0.5, name="a"), EmbeddingTable(20, 8)), batch=8, sparse=False)
    model = make_model(tables)
    assert [(t.rows, t.dim, t.pooling, t.exponent) for t in model.tables] == [(10, 8, 2.0, 0.5), (20, 8, 1.0, 0.0)]
    assert model.batch == 8 and not model.sparse


def test_the_forecast_is_the_price_of_the_search_with_its_parts(toy: Platform) -> None:
    plan = Plan.round_robin(3, ranks=2)
    found = forecast_plan(TINY, toy, plan)
    assert found["predicted_s"] == price_plan(TINY, toy, plan).time
    assert found["low_s"] < found["predicted_s"] < found["high_s"]
    parts = found["predicted_parts"]
    assert len(parts["embedding"]) == len(parts["dense"]) == 2
    assert parts["embedding"][0] > parts["embedding"][1] > 0, "two tables and one"
    size = 8 * 2 * 8 * 4.0  # batch, tables of the fullest rank, columns, bytes
    assert parts["all_to_all"] == pytest.approx(2 * float(toy.collective_time("all_to_all", size, ranks=2)))


def test_a_machine_as_predicted_has_no_regret(study: Any) -> None:
    trials, jobs = study()
    totals = trials.totals()
    assert totals["models"] == 2 and 12 <= totals["placements"] <= 16
    assert totals["regret"]["predicted"] == totals["floor"] == totals["repeat"] == 0
    assert totals["rank_correlation"] == totals["rank_repeat"] == pytest.approx(1) and totals["hits"] == 1
    assert set(totals["regret"]) == {*METHODS, "predicted"} - {"random 2"}
    assert totals["regret"]["search"] == pytest.approx(0, abs=1e-9)
    parts = {row["part"]: row for row in trials.parts().to_dicts()}
    assert parts["iteration"]["max"] <= 0.01 and parts["embedding"]["max"] <= 0.01 and parts["dense"]["max"] <= 0.01
    assert parts["collectives"]["mean"] > 0, "these were made up"
    assert sum(parts[name]["share"] for name in ("embedding", "dense", "collectives")) == pytest.approx(1)
    order = [job["workload"]["batch"] for job in jobs]
    assert order == [*order[:2], *order[:2]], "every model once before any a second time"
    methods = [name for row in trials.models[0]["placements"] for name in row["methods"]]
    assert sorted(methods) == sorted(METHODS), "a placement that two methods propose is measured once, and counts twice"


def test_regret_floor_and_excess_are_those_of_the_measured_times() -> None:
    def row(methods: list[str], predicted: float, *measured: float) -> dict[str, Any]:
        parts = {"embedding": [1.0, 2.0], "dense": [1.0, 1.0], "all_to_all": 0.5}
        return {"methods": methods, "owners": [0, 1], "predicted_s": predicted, "low_s": 0.0, "high_s": 9.0,
                "measured_s": list(measured), "predicted_parts": parts, "measured_parts": [parts, parts]}  # fmt: skip

    rows = [row(["search"], 1.0, 1.1, 1.3), row(["size", "lookup"], 2.0, 1.2, 1.0), row(["random"], 3.0, 2.2, 2.2)]
    entry = {"name": "a", "workload": {"tables": [1, 2]}, "placements": rows}
    trials = Trials((entry,), "toy", 2, "2026-01-01", {}, {}, {})
    found = trials.summary().to_dicts()[0]
    assert found["best_s"] == pytest.approx(1.1) and found["worst"] == pytest.approx(2)
    assert found["predicted"] == found["search"] == pytest.approx(1.2 / 1.1 - 1) and not found["hit"]
    assert found["size"] == found["lookup"] == 0
    assert found["floor"] == pytest.approx((1.3 / 1.0 - 1 + 1.2 / 1.1 - 1) / 2), "each pass judges the other's best"
    assert found["rank_correlation"] == pytest.approx(0.5)
    totals = trials.totals()
    assert totals["excess"] == pytest.approx(1.2 / 1.1 - 1) and totals["regret"]["random"] == pytest.approx(1)
    assert totals["excess_error"] is None and totals["hits_repeat"] == 0
    assert "whoever picks by one pass" in trials.as_text() and "<pre>" in trials._repr_html_()


def test_trials_survive_their_file_and_are_predicted_again(study: Any, toy: Platform, tmp_path: Path) -> None:
    trials, _ = study(lambda plan, number: 1.1 + 0.1 * number)
    again = Trials.load(trials.save(tmp_path / "t.json"))
    assert again.to_dict() == json.loads(json.dumps(trials.to_dict()))
    assert trials.totals()["repeat"] == pytest.approx(1.2 / 1.1 - 1)
    bent = json.loads(json.dumps(trials.to_dict()))
    for row in bent["models"][0]["placements"]:
        row["predicted_s"] *= 2
    (tmp_path / "bent.json").write_text(json.dumps(bent))
    fresh = predict_again(Trials.load(tmp_path / "bent.json"), toy)
    assert json.dumps(fresh.models) == json.dumps(trials.models)
    for text in ("", "[]", "{}", '{"format": 2}', '{"format": 1, "models": [{}]}', '{"format": 1, "models": 3}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json cannot be read: .*; pass a file that Trials\.save"):
            Trials.load(tmp_path / "bad.json")


def test_what_was_measured_before_an_interrupt_is_kept(study: Any) -> None:
    calls: list[int] = []

    def fail_late(plan: Plan, number: int) -> float:
        calls.append(number)
        if number == 1:
            raise MeasurementError("measuring process 1 was killed by signal 9")
        return 1.0

    with pytest.raises(MeasurementError):
        study(fail_late)
    _, jobs = study()
    assert len(jobs) == 2, "the first pass of both models was there"
    assert len(study()[1]) == 4, "a finished study is measured anew"


def test_a_stream_of_other_operations_is_noticed(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "price", lambda *_, **__: type("Costs", (), {"seconds": np.zeros(3)}))
        with pytest.raises((ValueError, IndexError)):
            study()
    run = {"operation_seconds": [1.0]}
    with pytest.raises(ValueError, match=r"ran 1 operations, its graph has \d+; measure again"):
        experiment._sum_inside(TINY, Plan.round_robin(3, ranks=2), [run, run])


def test_models_that_do_not_fit_and_other_machines(study: Any, toy: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "free_memory", lambda: (1e6, 1e6))
    with pytest.raises(ValueError, match=r"model 0 needs .* for all of its \d placements; 1 MB are free"):
        study()
    with pytest.raises(ValueError, match="ranks is 3; this machine has 2 cores"):
        study(ranks=3)
    with pytest.warns(UserWarning, match="toy is of invented core, this machine is .*; calibrate first"):
        monkeypatch.setattr(experiment, "run_processes", lambda *_, **__: pytest.fail("something was measured"))
        with pytest.raises(ValueError, match="1 MB are free"):
            measure_trials(toy, quick=True)


@pytest.mark.skipif(count_cores() < 2, reason="two ranks need two cores")
def test_two_processes_take_turns_among_placements() -> None:
    placements = [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    job = {"task": "placements", "workload": dump(TINY), "placements": placements, "seconds": 1e-3}
    by_rank = run_processes({**job, "rounds": 2, "operations": 1}, ranks=2)
    assert [len(results) for results in by_rank] == [3, 3]
    for place, owners in enumerate(placements):
        runs: list[Mapping[str, Any]] = [results[place] for results in by_rank]
        assert all(len(run["rounds"]) == 2 and run["n"] >= 4 and run["median"] > 0 for run in runs)
        parts = experiment._sum_inside(TINY, Plan.from_owners(owners, ranks=2), runs)
        assert set(parts) == {"embedding", "dense", "all_to_all", "all_reduce"} and len(parts["embedding"]) == 2


# The command line.


def run(words: list[str]) -> int:
    shown = warnings.showwarning
    try:
        return main(["shard", *words])
    finally:
        warnings.showwarning = shown


H100 = ["--platform", "h100-sxm-8", "--ranks", "8", "--steps", "300"]
BAD = {
    "nothing": (H100, "model is missing; give --model or --tables"),
    "model": (["--model", "bert-base", *H100], "model is 'bert-base'; known are dlrm-default"),
    "both": (["--model", "dlrm-mlperf", "--tables", "t.csv", *H100], "model and tables are both given"),
    "tables": (["--tables", "no.csv", *H100], "no.csv is no file"),
    "dim": (["--model", "dlrm-mlperf", "--dim", "8", *H100], "dim is given; a model knows"),
    "quick": (["--model", "dlrm-mlperf", "--quick", *H100], "quick is given; it is for --measure"),
    "memory": (["--model", "dlrm-mlperf", "--memory", "0", *H100], "memory is 0"),
    "room": (["--model", "dlrm-mlperf", "--memory", "2e9", *H100], "memory"),
    "ranks": (["--model", "dlrm-mlperf", "--platform", "h100-sxm-8", "--ranks", "16"], "ranks is 16"),
    "seconds": (["--model", "dlrm-mlperf", *H100[:4], "--seconds", "0"], "seconds is 0"),
    "steps": (["--model", "dlrm-mlperf", *H100[:4], "--steps", "0"], "steps is 0"),
    "measured-steps": (["--measure", "--platform", "zen5-2", "--steps", "9"], "steps is given; it bounds a search"),
    "plan": (["--model", "dlrm-mlperf", "--plan", "no.json", *H100], "no.json cannot be read"),
    "json": (["--model", "dlrm-mlperf", "--json", "no/such.json", *H100], "json is .*folder does not exist"),
    "measured-plan": (["--measure", "--out", "p.json", "--platform", "zen5-2"], "out is given; it is for a search"),
    "measured-ranks": (["--measure", "--platform", "zen5-2", "--ranks", "4096"], "ranks is 4096; this machine has"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_bad_lines_end_with_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "run_processes", lambda *_, **__: pytest.fail("something was measured"))
    assert run(words) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(said)


def test_a_plan_is_found_written_and_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, plan, figures = (tmp_path / name for name in ("t.csv", "plan.json", "figures.json"))
    table.write_text("rows,dim,pooling\n" + "100000,64,8\n" * 12)
    words = ["--tables", str(table), "--batch", "4096", *H100]
    assert run([*words, "--out", str(plan), "--json", str(figures)]) == 0
    said = capsys.readouterr().out
    assert "12 tables on 8 ranks of h100-sxm-8" in said and "unique-rows" in said and f"written to {plan}" in said
    assert len(re.findall(r"(?m)^\d .*%$", said)) == 8, "a line for each rank"
    data = json.loads(figures.read_text())
    assert data["format"] == 1 and data["bound_s"] <= data["predicted_s"] and len(data["ranks"]) == 8
    assert sum(data["parts_s"].values()) == pytest.approx(data["predicted_s"])
    assert Plan.from_json(json.dumps(data["plan"])) == Plan.load(plan)
    assert data["methods"][0]["method"] == "search"
    assert run([*words, "--plan", str(plan)]) == 0
    assert "1.00 times as long" in capsys.readouterr().out


def test_tables_of_a_file_are_measured(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, _ = study()
    asked: list[Any] = []
    monkeypatch.setattr(experiment, "measure_trials", lambda *names, **more: asked.append((names, more)) or trials)
    table, out = tmp_path / "mine.csv", tmp_path / "out.json"
    table.write_text("rows,dim\n" + "1000,16\n" * 4)
    words = ["--measure", "--platform", "zen5-2", "--quick"]
    assert run([*words, "--tables", str(table), "--batch", "64", "--seconds", "0.5", "--json", str(out)]) == 0
    (names, more), said = asked[0], capsys.readouterr().out
    assert names == ("zen5-2",) and more["seconds"] == 0.5 and more["quick"] and "ranks" not in more
    assert list(more["models"]) == ["mine"] and len(more["models"]["mine"].tables) == 4
    assert "regret of the predicted best" in said and Trials.load(out).models
    assert run(words) == 0 and asked[1][1]["models"] is None


def test_the_study_is_put_beside_its_bars(study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trials, _ = study()
    assert "NO" in sharding_study.format_bars(trials.totals()), "two models are no study"
    assert "NO" not in sharding_study.format_bars({**trials.totals(), "models": 10})
    file = trials.save(tmp_path / "t.json")
    assert sharding_study.main(["--saved", str(file), "--json", str(tmp_path / "again.json")]) == 0
    assert "mean regret" in capsys.readouterr().out
    assert Trials.load(tmp_path / "again.json").platform == "zen5-2"


SAVED = sorted(find_reference("measured").glob("*.sharding-*.json"))


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_the_committed_study_meets_its_bars(path: Path) -> None:
    trials = Trials.load(path)
    again = predict_again(trials, path.name.split(".")[0])
    totals = again.totals()
    assert totals["models"] >= 10 and all(
        sorted(m for row in entry["placements"] for m in row["methods"]) == sorted(METHODS) for entry in trials.models
    )
    assert "NO" not in sharding_study.format_bars(totals)
