"""The command line: doctor, calibrate, predict, shard, check, demo; thin over the functions of the library."""

import argparse
import io
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from perfkit.runlog import Copy, write_log
from perfkit.units import escape

__all__ = ["main", "run_command"]


def _doctor(arguments: argparse.Namespace) -> int:
    from perfkit.doctor import diagnose, format_findings

    findings = diagnose()
    print(format_findings(findings))
    return 1 if any(finding.ok is False for finding in findings) else 0


def _calibrate(arguments: argparse.Namespace) -> int:
    if Path(arguments.out).suffix != ".toml" and not Path(arguments.out).is_dir():
        raise ValueError(
            f"out is {arguments.out!r}; platform files are known by their ending; name it {arguments.out}.toml"
        )
    if arguments.from_nccl_logs or arguments.from_kernel_database or arguments.base:
        return _assemble(arguments)
    import perfkit as pk
    from perfkit.campaign import launched_ranks, measure_collectives
    from perfkit.measure.folders import Campaign

    place, device = launched_ranks(), arguments.device or "cpu"
    if place and place[0] > 0:  # this rank only takes part in the collectives
        seconds = 0.1 if arguments.quick else 0.2  # as rank 0 does
        measure_collectives(Campaign(None), device=device, ranks=place[1], seconds=seconds)
        return 0
    options = {"ranks": arguments.ranks, "quick": arguments.quick, "models": arguments.models or "standard"}
    platform = pk.calibrate(device=device, out=arguments.out, measurements=arguments.measurements, **options)
    print(
        f"{platform!r}\nwritten to {arguments.out}"
        + ("" if arguments.measurements else ", its raw measurements beside it")
    )
    return 0


def _refuse(arguments: argparse.Namespace, names: str, why: str) -> None:
    """Turn away options that mean nothing beside the others."""
    for name in names.split():
        if getattr(arguments, name) is not None and getattr(arguments, name) is not False:
            raise ValueError(f"{name} is given; {why}; leave it out")


def _assemble(arguments: argparse.Namespace) -> int:
    """Make a platform of what others have measured; this machine takes no part in it."""
    from datetime import date

    from perfkit.assembly import assemble_sources, find_base
    from perfkit.campaign import check_target
    from perfkit.gallery import load_platform
    from perfkit.units import format_table

    _refuse(arguments, "device ranks quick models", "it is for measuring this machine, --from-... measure nothing")
    if not arguments.from_nccl_logs:
        _refuse(arguments, "partial", "it is for logs that break off, which --from-nccl-logs names")
    out = check_target("out", arguments.out)
    if not (arguments.from_nccl_logs or arguments.from_kernel_database):
        raise ValueError("base is given; name what to put into it: --from-nccl-logs, --from-kernel-database, or both")
    base = load_platform(arguments.base) if arguments.base else find_base(arguments.from_kernel_database)
    platform = assemble_sources(
        base, name=out.stem, nccl_logs=arguments.from_nccl_logs, kernel_database=arguments.from_kernel_database,
        partial=arguments.partial, date=date.today().isoformat(),
    )  # fmt: skip
    platform.save(out)
    old = {**base.kernels, **base.collectives}
    new = {key: fit for key, fit in {**platform.kernels, **platform.collectives}.items() if fit != old.get(key)}
    if not new:
        print(f"nothing differs from {base.name}")
    rows = [(key, fit.form, f"{fit.spread:.0%}", f"{fit.n}", fit.source) for key, fit in new.items()]
    print(format_table([("fitted", "form", "spread", "points", "source"), *rows]))
    notes = [f"{key}: {note}" for key, fit in new.items() for note in fit.notes if "poor" in note]
    print("\n".join([*notes, repr(platform), f"written to {out}"]))
    return 0


def _workload(arguments: argparse.Namespace) -> Any:
    from perfkit.units import check_choice
    from perfkit.workloads.dlrm import DLRM
    from perfkit.workloads.dlrm import PRESETS as RECOMMENDERS
    from perfkit.workloads.transformer import PRESETS, Transformer

    check_choice("model", arguments.model, [*RECOMMENDERS, *PRESETS])
    options = {key: getattr(arguments, key) for key in ("batch", "dtype") if getattr(arguments, key) is not None}
    if arguments.model in RECOMMENDERS:
        _refuse(arguments, "sequence", "a DLRM has none")
        return DLRM(arguments.model, **options)
    if arguments.sequence is not None:
        options["sequence"] = arguments.sequence
    build = Transformer.gpt2 if arguments.model.startswith("gpt2") else Transformer.bert
    return build(arguments.model, **options)


def _predict(arguments: argparse.Namespace) -> int:
    import perfkit as pk
    from perfkit.estimates import keep_quiet

    workload = _workload(arguments)
    with keep_quiet():  # what it would say is a part of the explanation
        print(pk.predict(workload, arguments.platform, ranks=arguments.ranks).explain())
    return 0


def _shard(arguments: argparse.Namespace) -> int:
    import perfkit as pk
    from perfkit.campaign import check_target

    for name in ("json", "out"):
        if getattr(arguments, name):
            check_target(name, getattr(arguments, name))
    if arguments.measure:
        if arguments.steps is not None:
            raise ValueError("steps is given; it bounds a search, what is measured takes --seconds; leave it out")
        return _measure_plans(arguments)
    if not (arguments.model or arguments.tables):
        raise ValueError("model is missing; give --model or --tables, or --measure for a study of drawn models")
    _refuse(arguments, "quick", "it is for --measure, a search takes --seconds or --steps")
    workload, ranks = _tables(arguments), 2 if arguments.ranks is None else arguments.ranks
    work = 1.0 if arguments.seconds is None else arguments.seconds
    about: dict[str, Any] = {"memory": arguments.memory}
    old = pk.price_plan(workload, arguments.platform, pk.Plan.load(arguments.plan), **about) if arguments.plan else None
    bounds = {"seconds": work, "steps": arguments.steps, "seed": arguments.seed}
    result = pk.shard(workload, arguments.platform, ranks=ranks, **bounds, **about)
    print("\n".join([result.explain(), "", _ranks_as_text(result.prediction)]))
    if old is not None:
        print(f"\n{arguments.plan}: {old!r}, {old.time / result.prediction.time:.2f} times as long")
    if arguments.out:
        result.plan.save(arguments.out)
    if arguments.json:
        _write_search(result, arguments.json)
    for path in filter(None, (arguments.out, arguments.json)):
        print(f"written to {path}")
    return 0


def _ranks_as_text(price: Any) -> str:
    """What every rank does and holds."""
    from perfkit.units import format_bytes, format_table, format_time

    held = [sum(rank in place.ranks for place in price.plan.placements) for rank in range(price.plan.ranks)]
    rows: list[tuple[str, ...]] = [("rank", "tables", "lookup", "backward", "update", "memory", "of it")]
    for row, count in zip(price.table().iter_rows(named=True), held, strict=True):
        times = [format_time(row[f"{name}_s"]) for name in ("lookup", "backward", "update")]
        full = format_bytes(float(price.memory[row["rank"]])), f"{row['memory_share']:.1%}"
        rows.append((str(row["rank"]), str(count), *times, *full))
    return format_table(rows, numbers=True)


def _write_search(result: Any, path: str) -> None:
    """Plan and figures of a search, for other programs."""
    import json

    from perfkit.resources import write_text

    data = {
        "format": 1, "objective": result.objective, "predicted_s": result.prediction.time, "bound_s": result.bound,
        "gap": result.gap, "interval_s": result.prediction.interval(), "parts_s": dict(result.prediction.parts),
        "methods": result.compare().to_dicts(), "ranks": result.prediction.table().to_dicts(),
        "plan": json.loads(result.plan.to_json()),
    }  # fmt: skip
    write_text(path, json.dumps(data, indent=1) + "\n")


def _tables(arguments: argparse.Namespace) -> Any:
    """The DLRM or the tables to place."""
    from perfkit.readers.table_configs import read_tables
    from perfkit.units import check_choice
    from perfkit.workloads.dlrm import DLRM, PRESETS

    if arguments.model and arguments.tables:
        raise ValueError("model and tables are both given; a model has tables of its own; leave one out")
    if arguments.tables:
        return read_tables(arguments.tables, batch=arguments.batch, dim=arguments.dim)
    _refuse(arguments, "dim", "a model knows the width of its tables")
    batch = {} if arguments.batch is None else {"batch": arguments.batch}
    return DLRM(check_choice("model", arguments.model, PRESETS), **batch)


def _measure_plans(arguments: argparse.Namespace) -> int:
    """Measure placements on this machine: of one model or set of tables, or of the drawn models of the study."""
    from perfkit.trials.contenders import make_model
    from perfkit.trials.experiment import measure_trials
    from perfkit.workloads.dlrm import DLRM

    _refuse(arguments, "memory plan out", "it is for a search, --measure takes placements of its own")
    models = None
    if arguments.model or arguments.tables:
        found = _tables(arguments)
        models = {arguments.model or found.name: found if isinstance(found, DLRM) else make_model(found)}
    given = {key: getattr(arguments, key) for key in ("ranks", "seconds") if getattr(arguments, key) is not None}
    trials = measure_trials(arguments.platform, models=models, seed=arguments.seed, quick=arguments.quick, **given)
    if arguments.json:
        trials.save(arguments.json)
    print(trials.as_text())
    if arguments.json:
        print(f"written to {arguments.json}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    import perfkit as pk
    from perfkit.campaign import check_target

    if arguments.json:
        check_target("json", arguments.json)
    comparison = pk.check(arguments.platform, seed=arguments.seed, models=arguments.models or "standard")
    print(comparison.as_text())
    if arguments.json:
        comparison.save(arguments.json)
        print(f"written to {arguments.json}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from perfkit.campaign import check_target
    from perfkit.demonstration import demonstrate

    for name in ("report", "out"):
        check_target(name, getattr(arguments, name))
    demonstrate(quick=arguments.quick, report=Path(arguments.report), out=Path(arguments.out))
    return 0


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, as all other errors are told."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {escape(message, 1000)}; see {self.prog} --help\n")


_MODELS = "families: standard (DLRM, Transformer; the default) or all (XLNet, convolutional nets, data-parallel too)"

_Run = Callable[[argparse.Namespace], int]
_Add = Callable[[str, _Run, str], argparse.ArgumentParser]


def _add_calibrate(add: _Add) -> None:
    text = "Measure this machine, or fit what others have measured, and write a platform file."
    command = add("calibrate", _calibrate, text)
    command.add_argument("--out", required=True, metavar="P.toml", help="platform file to write")
    command.add_argument("--device", choices=("cpu", "cuda"), help="what to measure; default cpu")
    command.add_argument("--ranks", type=int, help="processes for collectives; default 2 where there are two cores")
    command.add_argument("--quick", action="store_true", help="two to three minutes instead of four to five")
    command.add_argument("--models", choices=("standard", "all"), help=_MODELS)
    kept = "measure nothing: fit the .measurements.json of an earlier calibration"
    command.add_argument("--measurements", metavar="FILE", help=kept)
    logs = "measure nothing: fit the collectives in these logs of nccl-tests, a file or a folder"
    command.add_argument("--from-nccl-logs", metavar="DIR", help=logs)
    command.add_argument("--partial", action="store_true", help="keep what a log holds before a line that does not fit")
    database = "measure nothing: fit what the package aiconfigurator-core knows of a system, such as h100_sxm"
    command.add_argument("--from-kernel-database", metavar="SYSTEM", help=database)
    base = "gallery name or platform file that gives what is not fitted; default: the gallery's node of the system"
    command.add_argument("--base", metavar="NAME", help=base)


def _add_shard(add: _Add) -> None:
    text = "Search for a placement of embedding tables, or measure placements on this machine."
    command = add("shard", _shard, text)
    command.add_argument("--model", help="preset of a DLRM: dlrm-default, dlrm-ddp, dlrm-mlperf")
    tables = "CSV, Parquet or JSON file of tables, recorded indices, or a published set such as mlperf-dlrm-dcnv2"
    command.add_argument("--tables", metavar="FILE", help=tables)
    command.add_argument("--platform", required=True, help="gallery name or platform file")
    command.add_argument("--ranks", type=int, help="ranks that hold tables; default 2")
    command.add_argument("--batch", type=int, help="samples over all ranks")
    command.add_argument("--dim", type=int, help="columns of tables whose file does not tell")
    command.add_argument("--memory", type=float, metavar="BYTES", help="memory of a rank; default: that of its device")
    work = "work on the search, default 1; with --measure: time for each placement and pass, default 1.2"
    command.add_argument("--seconds", type=float, help=work)
    command.add_argument("--steps", type=int, help="steps of the search in place of --seconds: equal on every machine")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--plan", metavar="PLAN", help="file of a plan to price beside the one that is found")
    command.add_argument("--out", metavar="PLAN", help="file for the plan")
    command.add_argument("--json", metavar="OUT", help="file for all figures; with --measure for all that was measured")
    measure = "measure what the search and rules of thumb propose; without --model or --tables for 12 drawn models"
    command.add_argument("--measure", action="store_true", help=measure)
    command.add_argument("--quick", action="store_true", help="with --measure: two models and a third of the time")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="perfkit", description="How long will one training iteration take, and what limits it?")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, run: _Run, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    add("doctor", _doctor, "Is this machine fit for a calibration? Exit code 1 where something would spoil it.")
    _add_calibrate(add)
    command = add("predict", _predict, "Predict one training iteration.")
    command.add_argument("--model", required=True, help="preset: dlrm-default, dlrm-mlperf, bert-base, gpt2, ...")
    command.add_argument("--platform", required=True, help="gallery name or platform file")
    command.add_argument("--batch", type=int, help="samples or sequences over all ranks")
    command.add_argument("--sequence", type=int, help="tokens of one sequence")
    command.add_argument("--dtype", help="fp32, tf32, bf16, fp16")
    command.add_argument("--ranks", type=int, default=1)
    _add_shard(add)
    command = add("check", _check, "Predict random configurations, measure them, and compare.")
    command.add_argument("--platform", required=True, help="platform file of this machine")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--models", choices=("standard", "all"), help=_MODELS)
    command.add_argument("--json", metavar="OUT", help="file for the pairs")
    command = add("demo", _demo, "Calibrate this machine, predict, measure, and write a report.")
    command.add_argument("--quick", action="store_true", help="calibrate in two to three minutes")
    command.add_argument("--report", default="perfkit-report.html", metavar="HTML")
    command.add_argument("--out", default="perfkit-platform.toml", metavar="P.toml", help="platform file to write")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    words : sequence of str, optional
        Command line words; by default those of the process.

    Returns
    -------
    code : int
        0 for success, 1 where `doctor` found something, 2 for an error told in one line, 130 when interrupted [-].
    """
    arguments = _parser().parse_args(words)
    log = None
    if arguments.command in ("calibrate", "check", "demo") or getattr(arguments, "measure", False):
        files = (getattr(arguments, name, None) for name in ("report", "out", "json"))
        log = Path(next(filter(None, files), "")).parent
    return run_command(lambda: int(arguments.run(arguments)), log=log)


def run_command(run: Callable[[], int], *, name: str = "perfkit", log: Path | None = None) -> int:
    """Run a command and tell what goes wrong in one line.

    Parameters
    ----------
    run : callable
        Returns the exit code.
    name : str, optional
        Starts each line.
    log : Path, optional
        Folder for ``perfkit-run.log``, which is written when a command fails that had begun to say something.

    Returns
    -------
    code : int
        That of `run`, 2 for an error, 130 when interrupted, 128 and the number of a signal that asks to end.
    """
    from perfkit.measure.runner import tidy

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"{name}: note: {escape(message, 1000)}", file=sys.stderr)

    warnings.showwarning = show
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character still shows the rest
    printed: list[str] = []
    with redirect_stdout(Copy(sys.stdout, printed)), redirect_stderr(Copy(sys.stderr, printed)):
        try:
            with tidy():
                return run()
        except BaseException as error:
            caught, code, text = error, 2, str(error)
    if isinstance(caught, KeyboardInterrupt):
        code = 128 + (caught.args or (2,))[0]
        text = "interrupted; what was measured is kept, the same command goes on from there"
    elif isinstance(caught, ModuleNotFoundError):
        text = f"{caught.name} is not installed; pip install 'perfkit[measure]' brings it"
    print(f"{name}: {escape(text, 1000)}", file=sys.stderr)
    if log and printed and (file := write_log(log, printed, caught)):
        print(f"{name}: {file} tells more: machine, versions, what was printed; it can be sent", file=sys.stderr)
    if not isinstance(caught, KeyboardInterrupt | ImportError | ValueError | OSError | RuntimeError):
        raise caught
    return code


if __name__ == "__main__":
    sys.exit(main())
