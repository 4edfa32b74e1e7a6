"""The command line: one table of commands, thin over the functions of the library."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import perfkit as pk
from perfkit.calibration.commands import run_command
from perfkit.ground.files import write_text
from perfkit.ground.results import check_target
from perfkit.ground.units import check_choice, escape, format_bytes, format_table, format_time


class _Answer(NamedTuple):
    """What a command prints, what ``--json`` writes, and the exit code."""

    text: str
    data: Any
    code: int = 0


def _doctor(given: argparse.Namespace) -> _Answer:
    from perfkit.calibration.doctor import diagnose, format_findings

    findings = diagnose()
    bad = any(finding.ok is False for finding in findings)
    return _Answer(format_findings(findings), [asdict(finding) for finding in findings], int(bad))


def _calibrate(given: argparse.Namespace) -> _Answer:
    if Path(given.out).suffix != ".toml" and not Path(given.out).is_dir():
        raise ValueError(f"out is {given.out!r}; platform files are known by their ending; name it {given.out}.toml")
    if given.from_nccl_logs or given.from_kernel_database or given.base:
        return _assemble(given)
    from perfkit.calibration.campaign import launched_ranks, measure_collectives
    from perfkit.measure.folders import Campaign

    place, device = launched_ranks(), given.device or "cpu"
    if place and place[0] > 0:  # this rank only takes part in the collectives
        seconds = 0.1 if given.quick else 0.2  # as rank 0 does
        measure_collectives(Campaign(None), device=device, ranks=place[1], seconds=seconds)
        return _Answer("", None)
    options = {"ranks": given.ranks, "quick": given.quick, "models": given.models or "standard"}
    platform = pk.calibrate(device=device, out=given.out, measurements=given.measurements, **options)
    beside = "" if given.measurements else ", its raw measurements beside it"
    return _Answer(f"{platform!r}\nwritten to {given.out}{beside}", platform.numbers().to_dicts())


def _refuse(given: argparse.Namespace, names: str, why: str) -> None:
    """Turn away options that mean nothing beside the others."""
    for name in names.split():
        if getattr(given, name) is not None and getattr(given, name) is not False:
            raise ValueError(f"{name} is given; {why}; leave it out")


def _assemble(given: argparse.Namespace) -> _Answer:
    """Make a platform of what others have measured; this machine takes no part in it."""
    from perfkit.platform.sources import assemble_sources, find_base

    _refuse(given, "device ranks quick models", "it is for measuring this machine, --from-... measure nothing")
    if not given.from_nccl_logs:
        _refuse(given, "partial", "it is for logs that break off, which --from-nccl-logs names")
    out = check_target("out", given.out)
    if not (given.from_nccl_logs or given.from_kernel_database):
        raise ValueError("base is given; name what to put into it: --from-nccl-logs, --from-kernel-database, or both")
    base = pk.load_platform(given.base) if given.base else find_base(given.from_kernel_database)
    platform = assemble_sources(
        base, name=out.stem, nccl_logs=given.from_nccl_logs, kernel_database=given.from_kernel_database,
        partial=given.partial, date=date.today().isoformat(),
    )  # fmt: skip
    platform.save(out)
    old = {**base.kernels, **base.collectives}
    new = {key: fit for key, fit in {**platform.kernels, **platform.collectives}.items() if fit != old.get(key)}
    rows = [(key, fit.form, f"{fit.spread:.0%}", f"{fit.n}", fit.source) for key, fit in new.items()]
    lines = [] if new else [f"nothing differs from {base.name}"]
    lines.append(format_table([("fitted", "form", "spread", "points", "source"), *rows]))
    lines += [f"{key}: poor fit, {fit.notes[-1]}" for key, fit in new.items() if fit.quality == "poor"]
    return _Answer("\n".join([*lines, repr(platform), f"written to {out}"]), platform.numbers().to_dicts())


def _predict(given: argparse.Namespace) -> _Answer:
    from perfkit.platform.estimates import keep_quiet
    from perfkit.workloads import dlrm, transformer

    check_choice("model", given.model, [*dlrm.PRESETS, *transformer.PRESETS])
    options = {key: getattr(given, key) for key in ("batch", "sequence", "dtype") if getattr(given, key) is not None}
    if given.model in dlrm.PRESETS:
        _refuse(given, "sequence", "a DLRM has none")
        workload: Any = pk.DLRM(given.model, **options)
    else:
        build = pk.Transformer.gpt2 if given.model.startswith("gpt2") else pk.Transformer.bert
        workload = build(given.model, **options)
    with keep_quiet():  # what it would say is a part of the explanation
        found = pk.predict(workload, given.platform, ranks=given.ranks)
    data = {
        "workload": workload.description, "platform": found.platform.name, "ranks": found.ranks, "time_s": found.time,
        "interval_s": found.interval(), "lower_bound_s": found.lower_bound, "serial_s": found.serial,
        "bottleneck": found.bottleneck, "breakdown": found.breakdown().to_dicts(),
        "unmodelled_s": dict(found.unmodelled), "warnings": found.warnings,
    }  # fmt: skip
    return _Answer(found.explain(), data)


def _shard(given: argparse.Namespace) -> _Answer:
    if given.out:
        check_target("out", given.out)
    if given.measure:
        return _measure_plans(given)
    if not (given.model or given.tables):
        raise ValueError("model is missing; give --model or --tables, or --measure for a study of drawn models")
    _refuse(given, "quick", "it is for --measure, a search takes --seconds or --steps")
    workload, ranks = _read_tables(given), 2 if given.ranks is None else given.ranks
    old = pk.Plan.load(given.plan) if given.plan else None
    before = pk.price_plan(workload, given.platform, old, memory=given.memory) if old else None
    bounds = {"seconds": 1.0 if given.seconds is None else given.seconds, "steps": given.steps, "seed": given.seed}
    result = pk.shard(workload, given.platform, ranks=ranks, memory=given.memory, **bounds)
    price = result.prediction
    lines = [result.explain(), "", _tell_ranks(price)]
    if before:
        lines += ["", f"{given.plan}: {before!r}, {before.time / price.time:.2f} times as long"]
    if given.out:
        result.plan.save(given.out)
        lines.append(f"written to {given.out}")
    data = {
        "format": 1, "objective": result.objective, "predicted_s": price.time, "bound_s": result.bound,
        "gap": result.gap, "interval_s": price.interval(), "parts_s": dict(price.parts),
        "methods": result.compare().to_dicts(), "ranks": price.table().to_dicts(),
        "plan": json.loads(result.plan.to_json()),
    }  # fmt: skip
    return _Answer("\n".join(lines), data)


def _tell_ranks(price: Any) -> str:
    """What every rank does and holds."""
    held = [sum(rank in place.ranks for place in price.plan.placements) for rank in range(price.plan.ranks)]
    rows: list[tuple[str, ...]] = [("rank", "tables", "lookup", "backward", "update", "memory", "of it")]
    for row, count in zip(price.table().iter_rows(named=True), held, strict=True):
        times = [format_time(row[f"{name}_s"]) for name in ("lookup", "backward", "update")]
        full = format_bytes(float(price.memory[row["rank"]])), f"{row['memory_share']:.1%}"
        rows.append((str(row["rank"]), str(count), *times, *full))
    return format_table(rows, numbers=True)


def _read_tables(given: argparse.Namespace) -> Any:
    """The DLRM or the tables to place."""
    from perfkit.workloads.dlrm import PRESETS

    if given.model and given.tables:
        raise ValueError("model and tables are both given; a model has tables of its own; leave one out")
    if given.tables:
        return pk.read_tables(given.tables, batch=given.batch, dim=given.dim)
    _refuse(given, "dim", "a model knows the width of its tables")
    batch = {} if given.batch is None else {"batch": given.batch}
    return pk.DLRM(check_choice("model", given.model, PRESETS), **batch)


def _measure_plans(given: argparse.Namespace) -> _Answer:
    """Measure placements on this machine: of one model or set of tables, or of the drawn models of the study."""
    from perfkit.calibration.study import make_model, measure_trials

    _refuse(given, "steps", "it bounds a search, what is measured takes --seconds")
    _refuse(given, "memory plan out", "it is for a search, --measure takes placements of its own")
    models = None
    if given.model or given.tables:
        found = _read_tables(given)
        models = {given.model or found.name: found if isinstance(found, pk.DLRM) else make_model(found)}
    options = {key: getattr(given, key) for key in ("ranks", "seconds") if getattr(given, key) is not None}
    trials = measure_trials(given.platform, models=models, seed=given.seed, quick=given.quick, **options)
    return _Answer(trials.as_text(), trials.to_dict())


def _check(given: argparse.Namespace) -> _Answer:
    comparison = pk.check(given.platform, seed=given.seed, models=given.models or "standard")
    return _Answer(comparison.as_text(), comparison.to_dict())


def _demo(given: argparse.Namespace) -> _Answer:
    from perfkit.calibration.pages import demonstrate

    report, out = (check_target(name, getattr(given, name)) for name in ("report", "out"))
    return _Answer("", demonstrate(quick=given.quick, report=report, out=out).to_dict())


def _list_rows(rows: Sequence[dict[str, Any]]) -> _Answer:
    cells = [[str(value) for value in row.values()] for row in rows]
    return _Answer(format_table([list(rows[0]), *cells]), list(rows))


def _platforms(given: argparse.Namespace) -> _Answer:
    return _list_rows(pk.platforms().to_dicts())


def _models(given: argparse.Namespace) -> _Answer:
    from perfkit.workloads import dlrm, transformer

    found: list[Any] = [pk.DLRM(name) for name in dlrm.PRESETS]
    for name in transformer.PRESETS:
        found.append(pk.Transformer.gpt2(name) if name.startswith("gpt2") else pk.Transformer.bert(name))
    return _list_rows([{"model": model.name, "family": model.family, "default": model.description} for model in found])


def _tables(given: argparse.Namespace) -> _Answer:
    from perfkit.readers.table_configs import list_published

    rows = []
    for name in list_published():
        try:
            found = pk.read_tables(name)
            held = f"{len(found.tables)} tables, {format_bytes(sum(table.nbytes for table in found))} of weights"
        except ValueError:  # of some only the reuse of rows is published
            held = "reuse of rows; needs --dim"
        rows.append({"tables": name, "holds": held})
    return _list_rows(rows)


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, as commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {escape(message, 1000)}; see {self.prog} --help\n")


_Options = dict[str, dict[str, Any]]
_SWITCH, _NUMBER = {"action": "store_true"}, {"type": int}
_MODELS = {"choices": ("standard", "all"), "help": "families: standard (DLRM, Transformer; the default) or all"}
_GALLERY = {"required": True, "help": "gallery name or platform file"}
_SEED = {"type": int, "default": 0}

#: Every command: what runs it, what it does, its options.
_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], _Answer], str, _Options]] = {
    "doctor": (_doctor, "Is this machine fit for a calibration? Exit code 1 where something would spoil it.", {}),
    "calibrate": (_calibrate, "Measure this machine, or fit existing measurements, and write a platform file.", {
        "--out": {"required": True, "metavar": "P.toml", "help": "platform file to write"},
        "--device": {"choices": ("cpu", "cuda"), "help": "what to measure; default cpu"},
        "--ranks": {"type": int, "help": "processes for collectives; default 2 where there are two cores"},
        "--quick": _SWITCH | {"help": "two to three minutes instead of four to five"},
        "--models": _MODELS,
        "--measurements": {"metavar": "FILE", "help": "measure nothing: fit the raw measurements of a calibration"},
        "--from-nccl-logs": {"metavar": "DIR", "help": "measure nothing: fit logs of nccl-tests, a file or a folder"},
        "--partial": _SWITCH | {"help": "keep the rows of a log before a line that does not fit"},
        "--from-kernel-database": {"metavar": "SYSTEM", "help": "measure nothing: fit data of aiconfigurator-core"},
        "--base": {"metavar": "NAME", "help": "platform for all other parts; default: the gallery's node"},
    }),
    "predict": (_predict, "Predict one training iteration.", {
        "--model": {"required": True, "help": "preset, see perfkit models"},
        "--platform": _GALLERY,
        "--batch": _NUMBER | {"help": "samples or sequences over all ranks"},
        "--sequence": _NUMBER | {"help": "tokens of one sequence"},
        "--dtype": {"help": "fp32, tf32, bf16, fp16"},
        "--ranks": {"type": int, "default": 1},
    }),
    "shard": (_shard, "Search for a placement of embedding tables, or measure placements on this machine.", {
        "--model": {"help": "preset of a DLRM: dlrm-default, dlrm-ddp, dlrm-mlperf"},
        "--tables": {"metavar": "FILE", "help": "CSV, Parquet or JSON file, recorded indices, or see perfkit tables"},
        "--platform": _GALLERY,
        "--ranks": _NUMBER | {"help": "ranks that hold tables; default 2"},
        "--batch": _NUMBER | {"help": "samples over all ranks"},
        "--dim": _NUMBER | {"help": "columns of tables, for files without them"},
        "--memory": {"type": float, "metavar": "BYTES", "help": "memory of a rank; default: that of its device"},
        "--seconds": {"type": float, "help": "work on the search, default 1; --measure: time per placement and pass"},
        "--steps": _NUMBER | {"help": "steps of the search in place of --seconds: equal on every machine"},
        "--seed": _SEED,
        "--plan": {"metavar": "PLAN", "help": "file of a plan to price beside the one that is found"},
        "--out": {"metavar": "PLAN", "help": "file for the plan"},
        "--measure": _SWITCH | {"help": "measure proposed placements; without --model or --tables 12 drawn models"},
        "--quick": _SWITCH | {"help": "with --measure: two models and a third of the time"},
    }),
    "check": (_check, "Predict random configurations, measure them, and compare.", {
        "--platform": {"required": True, "help": "platform file of this machine"},
        "--seed": _SEED,
        "--models": _MODELS,
    }),
    "demo": (_demo, "Calibrate this machine, predict, measure, and write a report.", {
        "--quick": _SWITCH | {"help": "calibrate in two to three minutes"},
        "--report": {"default": "perfkit-report.html", "metavar": "HTML"},
        "--out": {"default": "perfkit-platform.toml", "metavar": "P.toml", "help": "platform file to write"},
    }),
    "platforms": (_platforms, "List the platforms of the gallery.", {}),
    "models": (_models, "List the presets of models.", {}),
    "tables": (_tables, "List the published sets of embedding tables.", {}),
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    words : sequence of str, optional
        Command line words; by default those of the process.

    Returns
    -------
    code : int
        0 for success, 1 where `doctor` found something, 2 for an error (reported in one line), 130 if interrupted [-].
    """
    parser = _Parser(prog="perfkit", description="How long will one training iteration take, and what limits it?")
    parser.add_argument("--version", action="version", version=f"perfkit {pk.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (_, text, options) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        for option, settings in options.items():
            command.add_argument(option, **settings)
        command.add_argument("--json", metavar="OUT", help="file for all figures; - prints them in place of the text")
    given = parser.parse_args(words)

    def run() -> int:
        if given.json not in (None, "-"):
            check_target("json", given.json)
        answer = _COMMANDS[given.command][0](given)
        data = json.dumps(answer.data, indent=1, default=str)
        if text := data if given.json == "-" else answer.text:
            print(text)
        if given.json not in (None, "-"):
            write_text(given.json, data + "\n")
            print(f"written to {given.json}")
        return answer.code

    log = None
    if given.command in ("calibrate", "check", "demo") or getattr(given, "measure", False):
        files = (getattr(given, name, None) for name in ("report", "out", "json"))
        log = Path(next(filter(None, files), "")).parent
    return run_command(run, log=log)


if __name__ == "__main__":
    sys.exit(main())
