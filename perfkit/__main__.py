"""The command line: one table of commands, thin over the functions of the library."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import perfkit as pk
from perfkit.calibration.commands import run_command
from perfkit.ground.results import write_cells
from perfkit.ground.targets import check_target, find_target, write_text
from perfkit.ground.units import check_choice, escape, format_bytes, format_table, show
from perfkit.workloads import dlrm, transformer

_Given = argparse.Namespace
#: What a calibration of GPUs left as it was, by the name in the provenance.
_TOLD = ("as in the base", "host", "not in the traces", "without a time")


class _Answer(NamedTuple):
    """Printed text, data for ``--json``, exit code, and results for ``--report``."""

    text: str
    data: Any
    code: int = 0
    results: Sequence[Any] = ()


def _pick(given: _Given, names: str) -> dict[str, Any]:
    """Those of some options that were given."""
    values = {name: getattr(given, name) for name in names.split()}
    return {
        name: value for name, value in values.items() if value is not None and value is not False
    }


def _refuse(given: _Given, names: str, why: str) -> None:
    """Refuse options that have no meaning with the others."""
    for name in _pick(given, names):
        raise ValueError(f"{name} is given; {why}; leave it out")


def _doctor(given: _Given) -> _Answer:
    from perfkit.calibration.doctor import diagnose, format_findings

    findings = diagnose()
    bad = any(finding.ok is False for finding in findings)
    return _Answer(format_findings(findings), [asdict(finding) for finding in findings], int(bad))


def _calibrate(given: _Given) -> _Answer:
    based = given.base and given.device != "cuda" and not given.traces
    if given.from_nccl_logs or given.from_kernel_database or based:
        return _assemble(given)
    _refuse(given, "partial ranks_per_node", "it is for logs, which --from-nccl-logs names")
    from perfkit.calibration.cpu_measure import measure_collectives
    from perfkit.measure.folders import Campaign
    from perfkit.measure.processes import launched_ranks

    place = launched_ranks()
    # only rank 0 writes the platform; of a CPU the others take part in collectives alone
    if place and place[0] > 0:
        if given.device == "cuda":
            pk.calibrate(**_pick(given, "device base"))
        else:
            measure_collectives(Campaign(None), ranks=place[1], seconds=0.1 if given.quick else 0.2)
        return _Answer("", None)
    platform = pk.calibrate(
        out=given.out, **_pick(given, "device base ranks quick models measurements traces")
    )
    note = (
        ""
        if given.measurements or given.traces
        else ", its raw measurements are in the same folder"
    )
    told = [f"{key}: {platform.provenance[key]}" for key in _TOLD if platform.provenance.get(key)]
    return _Answer(
        "\n".join([repr(platform), *told, f"written to {given.out}{note}"]),
        platform.numbers().to_dicts(),
    )


def _assemble(given: _Given) -> _Answer:
    """Make a platform from measurements of others, without measuring this machine."""
    from perfkit.platform.sources import assemble_sources, find_base

    _refuse(
        given,
        "device ranks quick models",
        "it is for measuring this machine, --from-... measure nothing",
    )
    if not given.from_nccl_logs:
        _refuse(given, "partial ranks_per_node", "it is for logs, which --from-nccl-logs names")
    out = check_target("out", given.out, ".toml")
    if not (given.from_nccl_logs or given.from_kernel_database):
        raise ValueError(
            "base is given; name the data to fit: --from-nccl-logs, --from-kernel-database, or both"
        )
    base = pk.load_platform(given.base) if given.base else find_base(given.from_kernel_database)
    platform = assemble_sources(
        base,
        name=out.stem,
        nccl_logs=given.from_nccl_logs,
        kernel_database=given.from_kernel_database,
        partial=given.partial,
        ranks_per_node=given.ranks_per_node,
        date=date.today().isoformat(),
    )
    platform.save(out)
    old, fits = {**base.kernels, **base.collectives}, {**platform.kernels, **platform.collectives}
    new = {key: fit for key, fit in fits.items() if fit != old.get(key)}
    lines = [] if new else [f"nothing differs from {base.name}"]
    rows = [
        (key, fit.form, f"{fit.spread:.0%}", f"{fit.n}", fit.source) for key, fit in new.items()
    ]
    lines.append(format_table([("fitted", "form", "spread", "points", "source"), *rows]))
    lines += [
        f"{key}: poor fit, {'; '.join(fit.notes)}"
        for key, fit in new.items()
        if fit.quality == "poor"
    ]
    return _Answer(
        "\n".join([*lines, repr(platform), f"written to {out}"]), platform.numbers().to_dicts()
    )


def _build(name: str, **options: Any) -> Any:
    """Make the workload of a preset."""
    check_choice("model", name, [*dlrm.PRESETS, *transformer.PRESETS])
    if name in transformer.PRESETS:
        return pk.Transformer.preset(name, **options)
    return pk.DLRM(name, **options)


def _predict(given: _Given) -> _Answer:
    from perfkit.platform.estimates import keep_quiet

    if given.model in dlrm.PRESETS:
        _refuse(given, "sequence parallel accumulate checkpoint", "a DLRM has none")
    workload = _build(given.model, **_pick(given, _WORKLOAD))
    with keep_quiet():  # the explanation has the warnings
        found = pk.predict(workload, given.platform, **_pick(given, "ranks execution loading"))
    data = {
        "workload": workload.description,
        "platform": found.platform.name,
        "ranks": found.ranks,
        "time_s": found.time,
        "execution": found.execution,
        "device_s": found.device_time,
        "interval_s": found.interval(),
        "lower_bound_s": found.lower_bound,
        "serial_s": found.serial,
        "bottleneck": found.bottleneck,
        "breakdown": found.breakdown().to_dicts(),
        "unmodelled_s": dict(found.unmodelled),
        "warnings": found.warnings,
    }
    return _Answer(found.explain(), data, results=[found])


def _shard(given: _Given) -> _Answer:
    if given.measure:
        return _measure_plans(given)
    if not (given.model or given.tables):
        raise ValueError(
            "model is missing; give --model or --tables, or --measure for a study of random models"
        )
    _refuse(given, "quick", "it is for --measure; a search takes --seconds or --steps")
    if given.out:
        check_target("out", given.out)
    workload, options = _read_tables(given), _pick(given, "ranks memory seconds steps seed")
    old = pk.Plan.load(given.plan) if given.plan else None
    before = pk.price_plan(workload, given.platform, old, memory=given.memory) if old else None
    notes = []
    if given.ranks is None:
        platform = pk.load_platform(given.platform)
        options["ranks"] = platform.network.ranks if old is None else old.ranks
        reason = f"all of {platform.name}" if old is None else "as in --plan"
        notes.append(f"ranks: {options['ranks']}, {reason}; --ranks takes another number")
    result = pk.shard(workload, given.platform, **options)
    price = result.prediction
    lines = [
        *notes,
        result.explain(),
        "",
        format_table(write_cells(result.by_rank()), numbers=True),
    ]
    if before:
        lines += ["", f"{given.plan}: {before!r}, {before.time / price.time:.2f} times as long"]
    if given.out:
        lines.append(f"written to {result.plan.save(given.out)}")
    data = {
        "format": 1,
        "objective": result.objective,
        "predicted_s": price.time,
        "bound_s": result.bound,
        "gap": result.gap,
        "interval_s": price.interval(),
        "parts_s": dict(price.parts),
        "methods": result.compare().to_dicts(),
        "ranks": price.table().to_dicts(),
        "plan": json.loads(result.plan.to_json()),
    }
    return _Answer("\n".join(lines), data, results=[result])


def _read_tables(given: _Given) -> Any:
    """Make the DLRM, or read the tables, to place."""
    if given.model and given.tables:
        raise ValueError(
            "model and tables are both given; a model has its own tables; leave one out"
        )
    if given.tables:
        return replace(
            pk.read_tables(given.tables, **_pick(given, "batch dim rows")),
            **_pick(given, "embedding"),
        )
    _refuse(given, "dim rows", "a model knows the sizes of its tables")
    return pk.DLRM(
        check_choice("model", given.model, dlrm.PRESETS), **_pick(given, "batch embedding")
    )


def _measure_plans(given: _Given) -> _Answer:
    """Measure placements on this machine, of one model or set of tables, or of the models of the
    study."""
    from perfkit.calibration.study import make_model, measure_trials

    _refuse(
        given,
        "steps memory plan out report",
        "it is for a search; --measure has its own placements and --seconds",
    )
    _check_measurable(given.platform)
    models = None
    if given.model or given.tables:
        found = _read_tables(given)
        models = {
            given.model or found.name: found if isinstance(found, pk.DLRM) else make_model(found)
        }
    trials = measure_trials(
        given.platform, models=models, **_pick(given, "ranks seconds seed quick")
    )
    return _Answer(trials.as_text(), trials.to_dict())


def _trace(given: _Given) -> _Answer:
    trace = pk.read_trace(given.files)
    views = ["breakdown", "idle", "host", "steps", "collectives", "stragglers"]
    frames = {name: getattr(trace, name)().to_dicts() for name in views}
    return _Answer(
        trace.explain(), {"time_s": trace.time, "basis": trace.basis, **frames}, results=[trace]
    )


def _check(given: _Given) -> _Answer:
    try:
        comparison = pk.check(given.platform, **_pick(given, "seed models"))
    except ValueError:
        _check_measurable(given.platform)
        raise
    platforms = [pk.load_platform(given.platform)] if given.report else []
    return _Answer(comparison.as_text(), comparison.to_dict(), results=[comparison, *platforms])


def _demo(given: _Given) -> _Answer:
    """Calibrate, predict, measure, compare and report; print each step."""
    from perfkit.measure.machine import count_cores
    from perfkit.measure.samples import draw_check

    page = check_target("report", given.report or "perfkit-report.html")
    out = check_target("out", given.out or "perfkit-platform.toml", ".toml")
    print(
        "First a prediction without any measurement: what would this take on a GPU of the gallery?"
    )
    bert = pk.Transformer.bert("bert-large", batch=8, sequence=512, dtype="bf16")
    print(f"  {pk.predict(bert, 'h100-sxm-8')!r}")
    print("\nNow measure this machine: kernels, collectives and a few small training iterations.")
    platform = pk.calibrate(out=out, quick=given.quick)
    two_ranks = min(platform.network.ranks, count_cores()) >= 2
    samples = draw_check(7, dlrm=6, transformer=4, hybrid=3 if two_ranks else 0)
    print(
        f"\nPredict {len(samples)} configurations that were not in the calibration, then measure them."
    )
    comparison = pk.check(platform, samples=samples)
    print("\n" + comparison.as_text())
    first = {sample.family: sample for sample in reversed(samples)}.values()
    shown = [pk.predict(s.workload, platform, ranks=s.ranks, plan=s.plan) for s in first]
    pk.report(
        comparison, *shown, platform, path=page, title="Predicted and measured training iterations"
    )
    print(f"\nReport:    {page} (one file, opens without a network)\nPlatform:  {out}")
    print("Notebooks: make lab, and start with notebooks/00_start_here.ipynb")
    return _Answer("", comparison.to_dict())


def _list_rows(rows: Sequence[dict[str, Any]]) -> _Answer:
    cells = [[str(value) for value in row.values()] for row in rows]
    return _Answer(format_table([list(rows[0]), *cells]), list(rows))


def _models(given: _Given) -> _Answer:
    found = [_build(name) for name in (*dlrm.PRESETS, *transformer.PRESETS)]
    return _list_rows(
        [
            {"model": model.name, "family": model.family, "default": model.description}
            for model in found
        ]
    )


def _tables(given: _Given) -> _Answer:
    from perfkit.readers.table_configs import list_published

    rows = []
    for name in list_published():
        try:
            found = pk.read_tables(name)
            held = f"{len(found.tables)} tables, {format_bytes(sum(table.nbytes for table in found))} of weights"
        except ValueError:  # some publish only the reuse of rows
            held = "reuse of rows; needs --dim"
        rows.append({"tables": name, "holds": held})
    return _list_rows(rows)


def _whole(text: str) -> int:
    """A whole number of the command line."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{show(text)} is no whole number; write it in digits, such as 64"
        ) from None


def _number(text: str) -> float:
    """A number of the command line."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{show(text)} is no number; write it without a unit, such as 80e9"
        ) from None


class _Saying(NamedTuple):
    """Words of the library that a command line needs otherwise."""

    library: str  # a pattern
    command: str


#: What the library says in the words of Python, and what to do on a command line.
_SAYINGS = (
    _Saying(
        r"hybrid sharding is a strategy: take strategy=Strategy\(.*",
        "hybrid sharding is a strategy, which only Python takes: pk.predict and pk.explore",
    ),
    _Saying(
        r"the model has (\d+) positions; shorten it or raise positions",
        r"the model has \1 positions; take --sequence \1 or less, or another model",
    ),
    _Saying(r"mixed is True with dtype '(\w+)'", r"--mixed is given with --dtype \1"),
    _Saying(r"take bf16 or fp16, or leave it", "take --dtype bf16 or fp16, or leave --mixed out"),
    _Saying(r"with_nodes\(\d+\), --platform", "--platform"),
    _Saying(
        r"or (\d+) nodes: with_nodes\(\d+\)",
        r"or a platform file of \1 nodes, as Platform.with_nodes of Python makes",
    ),
    _Saying(r"partial=True keeps", "--partial keeps"),
    _Saying(r"pass dim=, ", "pass --dim, "),
    _Saying(r"leave dim, rows and tables out", "leave --dim and --rows out"),
    _Saying(
        r"pass a file that Plan\.save has written",
        "name a plan that perfkit shard --out has written",
    ),
    _Saying(r"choose device cpu, or", "take --device cpu, or"),
)


def _say_for_commands(text: str) -> str:
    """An error of the library in the words of the command line."""
    for saying in _SAYINGS:
        text = re.sub(saying.library, saying.command, text)
    return text


def _check_measurable(name: str) -> None:
    """Refuse to measure iterations of a platform with GPUs on a machine without them."""
    platform = pk.load_platform(name)
    if platform.device.kind == "cpu":
        return
    from perfkit.measure.processes import check_torch

    check_torch()
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"platform is {show(name)}, which has GPUs; this command measures, and this machine has "
            "no GPU that PyTorch can use; run it where the GPUs are, or name the platform file of "
            "this machine"
        )


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, like the commands."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {escape(message, 1000)}; see {self.prog} --help\n")


#: Options of a workload.
_WORKLOAD = "batch dtype mixed sequence parallel accumulate checkpoint"
#: Every option with its arguments for argparse.
_OPTIONS: dict[str, dict[str, Any]] = {
    "accumulate": {"type": _whole, "help": "micro-batches per rank; they share the batch"},
    "base": {
        "metavar": "NAME",
        "help": "platform for all parts that are not fitted; default: the gallery's node",
    },
    "batch": {"type": _whole, "help": "samples or sequences over all ranks"},
    "checkpoint": {"action": "store_true", "help": "compute layers again in the backward pass"},
    "device": {"choices": ("cpu", "cuda"), "help": "what to measure; default cpu"},
    "dim": {"type": _whole, "help": "columns of tables, for files without them"},
    "dtype": {"help": "fp64, fp32, tf32, bf16, fp16, fp8, as far as the device has it"},
    "execution": {
        "choices": ("eager", "compiled", "graphs"),
        "help": "how the iteration runs; default eager",
    },
    "embedding": {
        "choices": ("separate", "fused"),
        "help": "kernels of tables; default: fused for TBE and MLPerf",
    },
    "from-kernel-database": {
        "metavar": "SYSTEM",
        "help": "measure nothing: fit data of aiconfigurator-core",
    },
    "from-nccl-logs": {
        "metavar": "DIR",
        "help": "measure nothing: fit logs of nccl-tests, a file or a folder",
    },
    "json": {"metavar": "OUT", "help": "file for all figures; - prints them instead of the text"},
    "loading": {
        "type": _number,
        "metavar": "SECONDS",
        "help": "time of the data loader per batch of a rank",
    },
    "measure": {
        "action": "store_true",
        "help": "measure placements: of --model, of --tables, or of 12 random models",
    },
    "measurements": {
        "metavar": "FILE",
        "help": "measure nothing: fit the raw measurements of a calibration",
    },
    "memory": {
        "type": _number,
        "metavar": "BYTES",
        "help": "memory of a rank; default: that of its device",
    },
    "mixed": {"action": "store_true", "help": "weights stay fp32, products run in --dtype"},
    "model": {"help": "preset, see perfkit models"},
    "models": {
        "choices": ("standard", "all"),
        "help": "families: standard (DLRM, Transformer; the default) or all",
    },
    "out": {"metavar": "FILE", "help": "file to write: a platform (.toml) or a plan"},
    "parallel": {"help": "what ranks divide: ddp (nothing, the default), zero1, zero2, fsdp"},
    "partial": {
        "action": "store_true",
        "help": "keep the rows of a log before a line that cannot be read",
    },
    "plan": {"metavar": "FILE", "help": "a plan to compare with the one that is found"},
    "platform": {"help": "platform file, or name in the gallery, see perfkit platforms"},
    "quick": {
        "action": "store_true",
        "help": "calibrate in two to three minutes; --measure: two models in less time",
    },
    "ranks": {"type": _whole, "help": "ranks that take part"},
    "ranks-per-node": {
        "type": _whole,
        "help": "ranks per node of the logs; default: that of the logs or of --base",
    },
    "report": {"metavar": "HTML", "help": "report to write"},
    "rows": {"type": _whole, "help": "rows of every table, for files without them"},
    "seconds": {
        "type": _number,
        "help": "time of the search, default 1; --measure: time per placement and pass",
    },
    "seed": {"type": _whole, "help": "seed of random numbers; default 0"},
    "sequence": {"type": _whole, "help": "tokens of one sequence"},
    "steps": {
        "type": _whole,
        "help": "steps of the search instead of --seconds: the same result on every machine",
    },
    "traces": {
        "metavar": "FILE",
        "nargs": "+",
        "help": "measure nothing: fit kernels of recorded steps into --base",
    },
    "tables": {
        "metavar": "FILE",
        "help": "CSV, Parquet or JSON file, recorded indices, or a name, see perfkit tables",
    },
}


#: Help of options that mean something of their own in one command, by command and option.
_HELP = {
    ("calibrate", "ranks"): "ranks that measure collectives; default 2, of GPUs all",
    ("predict", "ranks"): "ranks that take part; default 1",
    ("shard", "ranks"): "ranks that hold tables; default: all of the platform; --measure: 2",
    ("calibrate", "quick"): "measure fewer sizes, in two to three minutes",
    ("shard", "quick"): "with --measure: two models in less time",
    ("demo", "quick"): "calibrate in two to three minutes",
    ("calibrate", "out"): "platform file to write, NAME.toml",
    ("shard", "out"): "plan to write, as JSON",
    ("demo", "out"): "platform file to write; default perfkit-platform.toml",
    ("demo", "report"): "report to write; default perfkit-report.html",
    ("predict", "batch"): "samples or sequences over all ranks; default: that of the model",
}


class _Command(NamedTuple):
    """Function of a command, its description, the options that it needs and takes, and its
    files."""

    run: Callable[[_Given], _Answer]
    text: str
    needs: str = ""
    takes: str = ""
    files: str = ""


_COMMANDS = {
    "doctor": _Command(
        _doctor, "Is this machine fit for a calibration? Exit code 1 if something would disturb it."
    ),
    "calibrate": _Command(
        _calibrate,
        "Measure this machine, or fit existing measurements, and write a platform file.",
        "out",
        "device ranks quick models measurements from-nccl-logs ranks-per-node partial from-kernel-database traces base",
    ),
    "predict": _Command(
        _predict,
        "Predict one training iteration.",
        "model platform",
        f"{_WORKLOAD} ranks execution loading report",
    ),
    "shard": _Command(
        _shard,
        "Search for a placement of embedding tables, or measure placements on this machine.",
        "platform",
        "model tables ranks batch dim rows embedding memory seconds steps seed plan out measure quick report",
    ),
    "check": _Command(
        _check,
        "Predict random configurations, measure them, and compare.",
        "platform",
        "seed models report",
    ),
    "trace": _Command(
        _trace,
        "Explain where the time of recorded iterations went: traces of PyTorch's profiler.",
        takes="report",
        files="traces, one per rank, and execution traces of the same ranks",
    ),
    "demo": _Command(
        _demo,
        "Calibrate this machine, predict, measure, and write a report.",
        takes="quick report out",
    ),
    "platforms": _Command(
        lambda given: _list_rows(pk.platforms().to_dicts()), "List the platforms of the gallery."
    ),
    "models": _Command(_models, "List the presets of models."),
    "tables": _Command(_tables, "List the published sets of embedding tables."),
}


def _check_targets(given: _Given) -> None:
    """Check before a command runs that each of its files can be written, and that no two are the
    same file."""
    taken: dict[Path, str] = {}
    for option in ("json", "report", "out"):
        path = getattr(given, option, None)
        if path is None or (option == "json" and path == "-"):
            continue
        check_target(option, path)
        target = find_target(option, path)
        if not target.is_file:  # a terminal or /dev/null takes several texts
            continue
        if target.file in taken:
            first = taken[target.file]
            raise ValueError(
                f"{first} and {option} are the same file, {show(path)}; name two files"
            )
        taken[target.file] = option


def _find_log_folder(given: _Given) -> Path:
    """Folder of the first file that a command writes, for its log; the working folder if there is
    none."""
    for option in ("report", "out", "json"):
        path = getattr(given, option, None)
        if path and (os.path.isfile(path) or not os.path.exists(path)):
            return Path(path).parent
    return Path()


def _list_options(name: str) -> list[str]:
    """Options of a command, in their order."""
    command = _COMMANDS[name]
    return [*command.needs.split(), *command.takes.split(), "json"]


@cache
def _make_parser() -> _Parser:
    """Make the parser of all commands."""
    parser = _Parser(
        prog="perfkit", description="How long will one training iteration take, and what limits it?"
    )
    parser.add_argument("--version", action="version", version=f"perfkit {pk.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in _COMMANDS.items():
        added = commands.add_parser(name, help=command.text, description=command.text)
        if command.files:
            added.add_argument("files", metavar="FILE", nargs="+", help=command.files)
        for option in _list_options(name):
            settings = dict(_OPTIONS[option])
            settings["help"] = _HELP.get((name, option), settings["help"])
            added.add_argument(f"--{option}", required=option in command.needs.split(), **settings)
    return parser


def _refuse_words(command: str, unknown: Sequence[str]) -> NoReturn:
    """Refuse words that a command does not know, and name the options that it has."""
    options = _list_options(command)
    known = ", ".join(f"--{option}" for option in options)
    words = escape(" ".join(unknown), 200)
    text = f"unrecognized arguments: {words}; perfkit {command} takes {known}"
    _make_parser().exit(2, f"perfkit: {escape(text, 1000)}\n")


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    words : sequence of str, optional
        Command line words; by default those of the process.

    Returns
    -------
    code : int
        0 for success, 1 if `doctor` found a problem, 2 for an error (reported in one line), 130 for
        an interrupt [-].
    """
    words = sys.argv[1:] if words is None else words
    parser = _make_parser()
    for word in words:
        if word.startswith("--") and word.endswith("=--"):  # argparse takes it for no value at all
            parser.error(f"argument {word[:-3]}: '--' is no value")
    given, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse_words(given.command, unknown)
    file = None if given.json == "-" else given.json
    page = getattr(given, "report", None)

    def run() -> int:
        _check_targets(given)
        try:
            answer = _COMMANDS[given.command].run(given)
        except ValueError as error:
            raise ValueError(_say_for_commands(str(error))) from error
        data = json.dumps(answer.data, indent=1, default=str)
        if text := data if given.json == "-" else answer.text:
            print(text)
        written = [write_text(file, data + "\n")] if file else []
        if page and answer.results:
            written.append(pk.report(*answer.results, path=page))
        for path in written if given.json != "-" else ():
            print(f"written to {escape(path, 1000)}")
        return answer.code

    measures = given.command in ("calibrate", "check", "demo") or getattr(given, "measure", False)
    return run_command(run, log=_find_log_folder(given) if measures else None)


if __name__ == "__main__":
    sys.exit(main())
