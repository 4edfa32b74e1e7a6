"""``perfkit shard``: where to store embedding tables."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.options import (
    NUMBER,
    OF_BYTES,
    OF_SECONDS,
    WHOLE,
    describe_ranks,
    find_platform,
    keep_given,
    refuse_given,
)
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.commands.this_machine import check_measurable
from perfkit.ground.results import write_cells
from perfkit.ground.targets import write_text
from perfkit.ground.units import check_choice, escape, format_table, show
from perfkit.workloads import dlrm
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.tables import TableSet

_FOR_SEARCHES = "it is for a search; --measure has its own placements and --seconds"
_FOR_MEASURING = "it is for --measure; a search takes --seconds or --steps"


@click.command(
    "shard",
    cls=Command,
    examples=[
        "perfkit shard --tables mlperf-dlrm-dcnv2 --platform h100-sxm-8 --batch 65536 --out plan.json",
        "perfkit shard --tables mlperf-dlrm-v1 --platform h100-sxm-8 --format torchrec --module sparse.ebc --out plan.json",
        "perfkit shard --measure --platform mine.toml",
    ],
)
@options.platform
@options.nodes
@click.option("--model", help="preset of a DLRM, see perfkit models")
@click.option(
    "--tables",
    metavar="FILE",
    help="CSV, Parquet or JSON file, a log of TorchRec's planner, recorded indices, or a name, see perfkit tables",
)
@click.option(
    "--ranks",
    type=WHOLE,
    help="ranks that hold tables; default: all of the platform; --measure: 2",
)
@click.option("--batch", type=WHOLE, help="samples over all ranks")
@click.option("--dim", type=WHOLE, help="columns of tables, for files without them")
@click.option("--rows", type=WHOLE, help="rows of every table, for files without them")
@click.option(
    "--embedding",
    type=click.Choice(("separate", "fused")),
    help="kernels of tables; default: fused for TBE and MLPerf",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    help="what updates the rows of --tables; default: sgd",
)
@click.option(
    "--memory",
    type=OF_BYTES,
    metavar="BYTES",
    help="memory of a rank; default: that of its device",
)
@click.option(
    "--reserve",
    type=NUMBER,
    metavar="SHARE",
    help="share of that memory which stays free, as 0.15 in TorchRec's planner; default: 0",
)
@click.option(
    "--min-columns",
    type=WHOLE,
    metavar="COLUMNS",
    help="least columns of a shard of a split table; default 128 as in TorchRec, 1: no limit",
)
@click.option(
    "--kernels",
    metavar="NAMES",
    help="where tables may lie if device memory is too small, as fused,uvm_caching; default: fused",
)
@click.option(
    "--split-small",
    is_flag=True,
    help="leave small tables split that are stored whole or copied otherwise",
)
@click.option(
    "--seconds",
    type=OF_SECONDS,
    help="time of the search, default 1; --measure: time per placement and pass",
)
@click.option(
    "--steps",
    type=WHOLE,
    help="steps of the search instead of --seconds: the same result on every machine",
)
@click.option("--seed", type=WHOLE, help="seed of random numbers; default 0")
@click.option(
    "--plan",
    metavar="FILE",
    help="a plan to judge: JSON of perfkit or TorchRec, or what TorchRec's planner prints",
)
@click.option("--out", metavar="FILE", help="plan to write, as JSON")
@click.option(
    "--format",
    "form",
    type=click.Choice(("perfkit", "torchrec")),
    help="form of --out; torchrec: a ShardingPlan; default perfkit",
)
@click.option(
    "--module",
    metavar="PATH",
    help="with --format torchrec: path of the embedding collection in the model, as sparse.ebc",
)
@click.option(
    "--measure",
    is_flag=True,
    help="measure placements: of --model, of --tables, or of 12 random models",
)
@click.option("--quick", is_flag=True, help="with --measure: two models in less time")
@options.report
@options.json_file
def shard_command(
    platform: str,
    nodes: int | None,
    model: str | None,
    tables: str | None,
    ranks: int | None,
    batch: int | None,
    dim: int | None,
    rows: int | None,
    embedding: str | None,
    optimizer: str | None,
    memory: float | None,
    reserve: float | None,
    min_columns: int | None,
    kernels: str | None,
    split_small: bool,
    seconds: float | None,
    steps: int | None,
    seed: int | None,
    plan: str | None,
    out: str | None,
    form: str | None,
    module: str | None,
    measure: bool,
    quick: bool,
    report: str | None,
    json_file: str | None,
) -> int:
    """Search for a placement of embedding tables, or measure placements on this machine."""
    files = OutputFiles(json_file, report, out)
    files.check()
    if measure:
        refuse_given(
            _FOR_SEARCHES,
            steps=steps,
            memory=memory,
            reserve=reserve,
            min_columns=min_columns,
            kernels=kernels,
            split_small=split_small,
            plan=plan,
            out=out,
            format=form,
            module=module,
            report=report,
            nodes=nodes,
        )
        check_measurable(platform)
    else:
        if not model and not tables:
            raise ValueError(
                "model is missing; give --model or --tables, or --measure for a study of random models"
            )
        refuse_given(_FOR_MEASURING, quick=quick)
        if out is None and form is not None:
            raise ValueError(
                "format is given; it is the form of --out; name that file, too, or leave --format out"
            )
        if form != "torchrec":
            refuse_given("it is for --format torchrec", module=module)
    workload = _read_workload(model, tables, batch, dim, rows, embedding, optimizer)
    if workload is None or measure:
        settings = keep_given(ranks=ranks, seconds=seconds, seed=seed, quick=quick)
        answer = _measure(workload, model, platform, settings)
    else:
        settings = keep_given(seconds=seconds, steps=steps, seed=seed, split_small=split_small)
        limits = keep_given(memory=memory, reserve=reserve, min_columns=min_columns)
        if kernels is not None:
            limits["kernels"] = [kernel.strip() for kernel in kernels.split(",")]
        target = _PlanFile(out, form or "perfkit", module)
        machine = find_platform(platform, nodes)
        answer = _search(workload, machine, ranks, limits, plan, target, settings)
    files.write(answer)
    return 0


class _PlanFile(NamedTuple):
    """Where a plan is written, and how; `out` is None for nowhere."""

    out: str | None
    form: str
    module: str | None

    def write(self, result: pk.ShardingResult) -> str:
        """Write the plan of a search, and say where, and which modules of a model it is for."""
        if self.form == "perfkit":
            return f"written to {result.plan.save(str(self.out))}"
        modules = result.to_torchrec(module=self.module, plain=True)
        path = write_text(str(self.out), _write_modules(modules))
        return f"written to {path}, for {escape(', '.join(map(show, modules)), 400)} of the model"


def _write_modules(modules: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON of a plan in TorchRec's form, a table on each line."""
    parts = []
    for path, entries in modules.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
        parts.append(f" {json.dumps(path)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _read_workload(
    model: str | None,
    tables: str | None,
    batch: int | None,
    dim: int | None,
    rows: int | None,
    embedding: str | None,
    optimizer: str | None,
) -> DLRM | TableSet | None:
    """Make the DLRM, or read the tables, to place; None if neither is named."""
    if model and tables:
        raise ValueError(
            "model and tables are both given; a model has its own tables; leave one out"
        )
    if tables:
        if tables in dlrm.PRESETS and not Path(tables).exists():
            raise ValueError(
                f"tables is {show(tables)}, a model with tables of its own; name it with --model {tables}"
            )
        table_set = pk.read_tables(tables, batch=batch, dim=dim, rows=rows)
        return replace(table_set, **keep_given(embedding=embedding, optimizer=optimizer))
    if model:
        refuse_given("a model knows the sizes of its tables", dim=dim, rows=rows)
        refuse_given("a model has its own; it is for --tables", optimizer=optimizer)
        check_choice("model", model, dlrm.PRESETS)
        return pk.DLRM(model, **keep_given(batch=batch, embedding=embedding))
    return None


def _search(
    workload: DLRM | TableSet,
    platform: pk.Platform,
    ranks: int | None,
    limits: Mapping[str, Any],
    plan_file: str | None,
    target: _PlanFile,
    settings: Mapping[str, Any],
) -> Answer:
    """Search for a placement within limits, with further settings of `perfkit.shard`, and judge the plan of
    a file, if one is named."""
    lines = []
    judged = None
    if plan_file:
        judged = pk.judge_plan(workload, platform, plan_file, ranks=ranks, **limits, **settings)
        result = judged.found
    elif ranks is not None:
        result = pk.shard(workload, platform, ranks=ranks, **limits, **settings)
    else:
        result = pk.shard(workload, platform, ranks=platform.network.ranks, **limits, **settings)
    if ranks is None:
        count = result.plan.ranks
        if count == platform.network.ranks:
            lines.append(describe_ranks(count, platform))
        else:
            lines.append(f"ranks: {count}, as in --plan; --ranks takes another number")
    price = result.prediction
    lines += [result.explain(), "", format_table(write_cells(result.by_rank()), numbers=True), ""]
    lines += [format_table(result.holders()), *(f"  {line}" for line in result.describe_shared())]
    if judged is not None:
        lines += ["", f"{plan_file}: {judged.explain()}"]
    if target.out is not None:
        written = target.write(result)
        if judged is not None and judged.best is judged.yours and judged.yours.time < result.time:
            written += f": the plan that was found; that of {plan_file} is faster"
        lines.append(written)
    figures = {
        "format": 1,
        "objective": result.objective,
        "predicted_s": price.time,
        "bound_s": result.bound,
        "gap": result.gap,
        "bound_of_any_width_s": result.bound_of_any_width,
        "joined": list(result.joined),
        "given_up_s": result.given_up,
        "warnings": list(result.warnings),
        "interval_s": price.interval(),
        "parts_s": dict(price.parts),
        "methods": result.compare().to_dicts(),
        "ranks": price.table().to_dicts(),
        "plan": json.loads(result.plan.to_json()),
    }
    if judged is not None:
        figures["yours_s"] = judged.yours.time
        figures["yours_interval_s"] = judged.yours.interval()
    return Answer("\n".join(lines), figures, results=[result])


def _measure(
    workload: DLRM | TableSet | None,
    model: str | None,
    platform: str,
    settings: Mapping[str, Any],
) -> Answer:
    """Measure placements on this machine, of one workload or of the models of the study, with
    settings of `measure_trials`."""
    from perfkit.calibration.study import make_model, measure_trials

    models: dict[str, DLRM] | None
    if workload is None:
        models = None
    elif isinstance(workload, DLRM):
        models = {model or workload.name: workload}
    else:
        models = {workload.name: make_model(workload)}
    trials = measure_trials(platform, models=models, **settings)
    return Answer(trials.as_text(), trials.to_dict())
