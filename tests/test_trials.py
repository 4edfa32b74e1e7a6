"""The placement study: models, proposed placements, figures of measured times, and the command."""

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk
from benchmarks import sharding_study
from benchmarks.__main__ import PAGE
from benchmarks.helpers.saved_runs import predict_again
from perfkit.__main__ import main
from perfkit.calibration import study as studies
from perfkit.calibration.study import (
    METHODS,
    Trials,
    draw_models,
    make_model,
    measure_trials,
    propose_plans,
)
from perfkit.ground.files import find_reference
from perfkit.measure import processes
from perfkit.measure.machine import Fact, count_cores, describe_machine
from perfkit.measure.processes import run_processes
from perfkit.measure.samples import dump, load
from perfkit.platform.platform import Platform
from perfkit.sharding.planner import price_plan
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import EmbeddingTable, TableSet

TINY = DLRM(
    rows=[100, 50, 20], dim=8, pooling=[2, 1, 3.5], bottom=[8], top=[8], features=4, batch=8
)
Factor = Callable[[Plan, int], float]


def pretend(
    price: Callable[[DLRM, Plan], float], factor: Factor, jobs: list[dict[str, Any]]
) -> Callable[..., Any]:
    """A machine whose times are `factor` times the predicted ones."""

    def run(job: dict[str, Any], *, ranks: int) -> list[Any]:
        jobs.append(job)
        model: Any = load(job["workload"])
        number = sum(other["workload"] == job["workload"] for other in jobs) - 1
        out: list[list[Any]] = [[] for _ in range(ranks)]
        for owners in job["placements"]:
            plan = Plan.from_owners(owners, ranks=ranks)
            time = factor(plan, number) * price(model, plan)
            for rank in range(ranks):
                timing = {
                    "median": time - 1e-6 * rank,
                    "q1": 0.9 * time,
                    "q3": 1.1 * time,
                    "idle": 0.1 * time,
                }
                out[rank].append(timing)
        return out

    return run


@pytest.fixture(scope="module")
def priced(toy: Platform) -> tuple[Callable[..., Any], Callable[[DLRM, Plan], float]]:
    """Functions for the placements of a model and the time of a placement, each computed once."""
    return cache(partial(propose_plans, platform=toy)), cache(
        lambda model, plan: price_plan(model, toy, plan).time
    )


@pytest.fixture
def study(toy, priced, tmp_path, monkeypatch):
    proposed, price = priced
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(processes, "count_cores", lambda: 2)
    monkeypatch.setattr(studies, "propose_plans", lambda model, *_, **__: proposed(model))
    where = replace(toy, provenance={"processor": describe_machine()["processor"]})

    def run(factor: Factor = lambda plan, number: 1.0, **more: Any) -> tuple[Trials, list[Any]]:
        jobs: list[dict[str, Any]] = []
        monkeypatch.setattr(studies, "run_processes", pretend(price, factor, jobs))
        return measure_trials(where, progress=False, **{"quick": True, **more}), jobs

    return run


def test_models_are_always_the_same_and_within_what_is_promised() -> None:
    models = draw_models(12)
    assert draw_models(3) == {name: models[name] for name in ("model 0", "model 1", "model 2")}
    assert draw_models(2, seed=1)["model 0"] != models["model 0"]
    for number, model in enumerate(models.values()):
        assert (
            8 <= len(model.tables) <= 16
            and model.sparse == (number % 4 != 3)
            and 256 <= model.batch <= 2048
        )
        assert all(
            999 <= table.rows <= 1_000_001 and 1 <= table.pooling <= 64 for table in model.tables
        )
        assert sum(table.nbytes for table in model.tables) <= (3e8 if model.sparse else 1e8)


def test_every_method_proposes_whole_tables_under_equal_names_of_ranks(toy: Platform) -> None:
    model = draw_models(1)["model 0"]
    plans = propose_plans(model, toy)
    assert tuple(plans) == METHODS and len(METHODS) == 8 and plans["random"] != plans["random 2"]
    for plan in plans.values():
        assert {*map(type, plan.owners)} == {int} and plan.ranks == 2 and plan.owners[0] == 0
    times = {name: price_plan(model, toy, plan).time for name, plan in plans.items()}
    assert times["search"] == pytest.approx(min(times.values()), rel=1e-9)


def test_tables_become_a_model_where_they_can_be_measured() -> None:
    table = EmbeddingTable(10, 8)
    for tables, optimizer, message in (
        (
            (table, EmbeddingTable(10, 16)),
            "sgd",
            r"dim is \[8, 16\], .*; only separate fp32 tables of one",
        ),
        ((table,), "adam", "optimizer 'adam'; only"),
        ((EmbeddingTable(10, 8, itemsize=2),), "sgd", "dtype is fp16"),
        ((EmbeddingTable(10, 8, law=table.distribution),), "sgd", "law of 1 is given"),
    ):
        with pytest.raises(ValueError, match=message):
            make_model(TableSet(tables, batch=8, optimizer=optimizer))
    tables = TableSet(
        (EmbeddingTable(10, 8, 2.0, 0.5, name="a"), EmbeddingTable(20, 8)), batch=8, sparse=False
    )
    model = make_model(tables)
    assert [(t.rows, t.dim, t.pooling, t.exponent) for t in model.tables] == [
        (10, 8, 2.0, 0.5),
        (20, 8, 1.0, 0.0),
    ]
    assert model.batch == 8 and not model.sparse


def test_a_machine_as_predicted_has_no_regret(study: Any) -> None:
    trials, jobs = study()
    totals = trials.totals()
    assert totals["regret"]["predicted"] == totals["floor"] == totals["repeat"] == 0
    assert (
        totals["rank_correlation"] == totals["rank_repeat"] == pytest.approx(1)
        and totals["hits"] == 1
    )
    assert set(totals["regret"]) == {*METHODS, "predicted"} - {"random 2"}
    assert abs(trials.errors).max() < 1e-9 and trials.coverage() == 1
    order = [job["workload"]["batch"] for job in jobs]
    assert order == [*order[:2], *order[:2]], "every model once before any a second time"
    assert len(study()[1]) == 4, "a finished study is measured again"
    assert list_methods(trials, "model 0") == sorted(METHODS), (
        "a placement that two methods propose is measured once, and counts twice"
    )


def list_methods(trials: Trials, model: str) -> list[str]:
    """Methods whose placements of a model were measured, in the order of their names."""
    methods: list[str] = []
    for run in trials.runs:
        if run["family"] == model:
            methods += run["methods"]
    return sorted(methods)


def test_regret_floor_and_excess_are_those_of_the_measured_times() -> None:
    def run(methods: list[str], predicted: float, *measured: float) -> dict[str, Any]:
        times = {"predicted_s": predicted, "measured_s": sum(measured) / 2, "passes_s": measured}
        return {"family": "a", "methods": methods, **times}

    runs = (
        run(["search"], 1.0, 1.1, 1.3),
        run(["size", "lookup"], 2.0, 1.2, 1.0),
        run(["random"], 3.0, 2.2, 2.2),
    )
    trials = Trials((*runs, run(["random 2"], 3.0, 2.2, 2.2)), "toy", {}, {})
    found = trials.regrets().to_dicts()[0]
    assert found["best_s"] == pytest.approx(1.1) and found["worst"] == pytest.approx(2)
    assert (
        found["predicted"] == found["search"] == pytest.approx(1.2 / 1.1 - 1) and not found["hit"]
    )
    assert found["size"] == found["lookup"] == 0
    assert found["floor"] == pytest.approx((1.3 / 1.0 - 1 + 1.2 / 1.1 - 1) / 2), (
        "each pass judges the other's best"
    )
    totals = trials.totals()
    assert totals["excess"] == pytest.approx(1.2 / 1.1 - 1) and totals["regret"][
        "random"
    ] == pytest.approx(1)
    assert totals["excess_error"] is None and totals["hits_repeat"] == 0
    assert "of a choice by one pass" in trials.as_text()


def test_trials_survive_their_file_and_are_predicted_again(
    study: Any, toy: Platform, tmp_path: Path
) -> None:
    trials, _ = study(lambda plan, number: 1.1 + 0.1 * number)
    again = Trials.load(trials.save(tmp_path / "t.json"))
    assert again.to_dict() == json.loads(json.dumps(trials.to_dict())) and isinstance(again, Trials)
    assert trials.totals()["repeat"] == pytest.approx(1.2 / 1.1 - 1)
    bent = replace(again, runs=tuple(run | {"predicted_s": 2.0} for run in again.runs))
    assert predict_again(bent, toy).errors == pytest.approx(trials.errors)


def test_a_report_of_trials_says_their_regret(tmp_path: Path) -> None:
    trials = Trials.load(find_reference("measured", "zen5-2.sharding-0.json"))
    assert trials.headline().startswith("92 placements of 12 models on 2 ranks of zen5-2: regret 3")
    assert repr(trials) == trials.headline()
    page = pk.report(trials, path=tmp_path / "trials.html").read_text(encoding="utf-8")
    assert trials.headline() in page and "models under several placements" in page


@pytest.mark.parametrize("passes", [[], [1.0], [1.0, 1.0, 1.0]])
def test_trials_have_two_passes(tmp_path: Path, passes: list[float]) -> None:
    path = find_reference("measured", "zen5-2.sharding-0.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    data["runs"][3]["passes_s"] = passes
    changed = tmp_path / "trials.json"
    changed.write_text(json.dumps(data))
    message = rf"runs\[3\].passes_s holds {len(passes)} times; it must hold 2, one of each pass"
    with pytest.raises(ValueError, match=message):
        Trials.load(changed)


def test_models_that_do_not_fit_and_other_machines(
    study: Any, toy: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "gather_facts", lambda: {"free_memory": Fact(1e6, "")})
    with pytest.raises(
        ValueError, match=r"model 0 needs .* for all its \d placements; 1 MB are free"
    ):
        study()
    with pytest.raises(ValueError, match="ranks is 3; this machine has 2 cores"):
        study(ranks=3)
    text = "toy was measured on invented core, this machine is .*; calibrate this"
    with pytest.warns(UserWarning, match=text), pytest.raises(ValueError, match="1 MB are free"):
        measure_trials(toy, quick=True)


@pytest.mark.serial
@pytest.mark.skipif(count_cores() < 2, reason="two ranks need two cores")
def test_two_processes_take_turns_among_placements() -> None:
    job = {
        "task": "placements",
        "workload": dump(TINY),
        "placements": [[0, 1, 0], [0, 0, 1], [0, 0, 0]],
    }
    by_rank = run_processes({**job, "seconds": 1e-3}, ranks=2)
    assert [len(results) for results in by_rank] == [3, 3]
    for results in by_rank:
        for run in results:
            assert len(run["blocks"]) == 6 and run["n"] >= 12
            assert 0 < run["q1"] <= run["median"] <= run["q3"]


# The command line.


def run(line: str) -> int:
    shown = warnings.showwarning
    try:
        return main(["shard", *line.split()])
    finally:
        warnings.showwarning = shown


H100, ZEN = "--platform h100-sxm-8 --ranks 8 --steps 300", "--measure --platform zen5-2"
MLPERF = f"--model dlrm-mlperf {H100}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (H100, "model is missing; give --model or --tables"),
        (f"--model bert-base {H100}", "model is 'bert-base'; known are dlrm-default"),
        (f"{MLPERF} --tables t.csv", "model and tables are both given"),
        (f"{MLPERF} --dim 8", "dim is given; a model knows"),
        (f"{MLPERF} --quick", "quick is given; it is for --measure"),
        (f"{MLPERF} --memory 2e9", "memory: .* ranks would do"),
        (f"{MLPERF} --plan no.json", "no.json cannot be read"),
        (f"{ZEN} --steps 9", "steps is given; it is for a search"),
        (f"{ZEN} --ranks 4096", "ranks is 4096; this machine has"),
    ],
)
def test_bad_lines_end_with_one_sentence(
    line: str, message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        studies, "run_processes", lambda *_, **__: pytest.fail("something was measured")
    )
    assert run(line) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, said)


def test_a_plan_is_found_written_and_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.csv"
    plan = tmp_path / "plan.json"
    figures = tmp_path / "figures.json"
    table.write_text("rows,dim,pooling\n" + "100000,64,8\n" * 12)
    line = f"--tables {table} --batch 4096 {H100}"
    assert run(f"{line} --out {plan} --json {figures}") == 0
    said, data = capsys.readouterr().out, json.loads(figures.read_text())
    assert (
        "12 tables on 8 ranks of h100-sxm-8" in said
        and "unique-rows" in said
        and f"written to {plan}" in said
    )
    assert len(re.findall(r"(?m)^\d .*%$", said)) == 8, "a line for each rank"
    assert (
        data["format"] == 1 and data["bound_s"] <= data["predicted_s"] and len(data["ranks"]) == 8
    )
    assert sum(data["parts_s"].values()) == pytest.approx(data["predicted_s"])
    assert (
        Plan.from_json(json.dumps(data["plan"])) == Plan.load(plan)
        and data["methods"][0]["method"] == "search"
    )
    assert run(f"{line} --plan {plan}") == 0 and "1.00 times as long" in capsys.readouterr().out


def test_tables_of_a_file_are_measured(
    study: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    (trials, _), asked = study(), list[Any]()
    monkeypatch.setattr(
        studies, "measure_trials", lambda *names, **more: asked.append((names, more)) or trials
    )
    table, out = tmp_path / "mine.csv", tmp_path / "out.json"
    table.write_text("rows,dim\n" + "1000,16\n" * 4)
    assert run(f"{ZEN} --quick --tables {table} --batch 64 --seconds 0.5 --json {out}") == 0
    (names, more), said = asked[0], capsys.readouterr().out
    assert names == ("zen5-2",) and more["seconds"] == 0.5 and more["quick"] and "ranks" not in more
    assert list(more["models"]) == ["mine"] and len(more["models"]["mine"].tables) == 4
    assert "regret of the predicted best" in said and Trials.load(out).runs
    assert run(ZEN) == 0 and asked[1][1]["models"] is None


def test_the_study_is_put_beside_its_bars(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials, _ = study()
    assert "NO" in sharding_study.format_bars(trials.totals()), "two models are no study"
    assert "NO" not in sharding_study.format_bars({**trials.totals(), "models": 10})
    file, again = trials.save(tmp_path / "t.json"), tmp_path / "again.json"
    assert sharding_study.main(["--saved", str(file), "--json", str(again)]) == 0
    assert "mean regret" in capsys.readouterr().out and Trials.load(again).platform == "zen5-2"


@pytest.mark.parametrize("name", ["zen5-2.sharding-0", "zen3-2.sharding-1"])
def test_the_committed_study_meets_its_bars(name: str) -> None:
    """The page of accuracy has today's predictions; test_readme.py computes them again."""
    trials = Trials.load(find_reference("measured", f"{name}.json"))
    page = PAGE.read_text(encoding="utf-8")
    bars = page.split(f"measured/{name}.json")[1].split("```")[1].split("met\n")[1].splitlines()
    assert len(bars) == 3 and all(line.endswith("yes") for line in bars)
    for model in dict.fromkeys(run["family"] for run in trials.runs):
        assert list_methods(trials, model) == sorted(METHODS)
