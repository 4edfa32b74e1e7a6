"""The command line: doctor, calibrate, predict, check, demo; thin over the functions of the library."""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
    from perfkit.campaign import Campaign, launched_ranks, measure_collectives

    place, device = launched_ranks(), arguments.device or "cpu"
    if place and place[0] > 0:  # this rank only takes part in the collectives
        seconds = 0.1 if arguments.quick else 0.2  # as rank 0 does
        measure_collectives(Campaign(None), device=device, ranks=place[1], seconds=seconds)
        return 0
    platform = pk.calibrate(device=device, ranks=arguments.ranks, quick=arguments.quick, out=arguments.out)
    print(f"{platform!r}\nwritten to {arguments.out}, its raw measurements beside it")
    return 0


def _assemble(arguments: argparse.Namespace) -> int:
    """Make a platform of what others have measured; this machine takes no part in it."""
    from datetime import date

    from perfkit.assembly import assemble_sources, find_base
    from perfkit.campaign import check_target
    from perfkit.gallery import load_platform
    from perfkit.units import format_table

    for name in ("device", "ranks", "quick"):
        if getattr(arguments, name):
            raise ValueError(
                f"{name} is given; it is for measuring this machine, --from-... measure nothing; leave it out"
            )
    if arguments.partial and not arguments.from_nccl_logs:
        raise ValueError(
            "partial is given; it is for logs that break off; name them with --from-nccl-logs, or leave it out"
        )
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
        if arguments.sequence is not None:
            raise ValueError("sequence is given; a DLRM has none; leave it out")
        return DLRM(arguments.model, **options)
    if arguments.sequence is not None:
        options["sequence"] = arguments.sequence
    build = Transformer.gpt2 if arguments.model.startswith("gpt2") else Transformer.bert
    return build(arguments.model, **options)


def _predict(arguments: argparse.Namespace) -> int:
    import perfkit as pk

    workload = _workload(arguments)
    print(pk.predict(workload, arguments.platform, ranks=arguments.ranks).explain())
    return 0


def _check(arguments: argparse.Namespace) -> int:
    import perfkit as pk
    from perfkit.campaign import check_target

    if arguments.json:
        check_target("json", arguments.json)
    comparison = pk.check(arguments.platform, seed=arguments.seed)
    print(comparison.as_text())
    if arguments.json:
        comparison.save(arguments.json)
        print(f"written to {arguments.json}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from perfkit.campaign import check_target
    from perfkit.demonstration import demonstrate

    check_target("report", arguments.report)
    demonstrate(quick=arguments.quick, report=Path(arguments.report), out=Path(arguments.out))
    return 0


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, as all other errors are told."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="perfkit", description="How long will one training iteration take, and what limits it?")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    add("doctor", _doctor, "Is this machine fit for a calibration? Exit code 1 where something would spoil it.")
    text = "Measure this machine, or fit what others have measured, and write a platform file."
    command = add("calibrate", _calibrate, text)
    command.add_argument("--out", required=True, metavar="P.toml", help="platform file to write")
    command.add_argument("--device", choices=("cpu", "cuda"), help="what to measure; default cpu")
    command.add_argument("--ranks", type=int, help="processes for collectives; default 2 where there are two cores")
    command.add_argument("--quick", action="store_true", help="about 90 seconds instead of four minutes")
    logs = "measure nothing: fit the collectives in these logs of nccl-tests, a file or a folder"
    command.add_argument("--from-nccl-logs", metavar="DIR", help=logs)
    command.add_argument("--partial", action="store_true", help="keep what a log holds before a line that does not fit")
    database = "measure nothing: fit what the package aiconfigurator-core knows of a system, such as h100_sxm"
    command.add_argument("--from-kernel-database", metavar="SYSTEM", help=database)
    base = "gallery name or platform file that gives what is not fitted; default: the gallery's node of the system"
    command.add_argument("--base", metavar="NAME", help=base)
    command = add("predict", _predict, "Predict one training iteration.")
    command.add_argument("--model", required=True, help="preset: dlrm-default, dlrm-mlperf, bert-base, gpt2, ...")
    command.add_argument("--platform", required=True, help="gallery name or platform file")
    command.add_argument("--batch", type=int, help="samples or sequences over all ranks")
    command.add_argument("--sequence", type=int, help="tokens of one sequence")
    command.add_argument("--dtype", help="fp32, tf32, bf16, fp16")
    command.add_argument("--ranks", type=int, default=1)
    command = add("check", _check, "Predict random configurations, measure them, and compare.")
    command.add_argument("--platform", required=True, help="platform file of this machine")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--json", metavar="OUT", help="file for the pairs")
    command = add("demo", _demo, "Calibrate this machine, predict, measure, and write a report.")
    command.add_argument("--quick", action="store_true", help="calibrate in about 90 seconds")
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
    return run_command(lambda: int(arguments.run(arguments)))


def run_command(run: Callable[[], int], *, name: str = "perfkit") -> int:
    """Run a command and tell what goes wrong in one line.

    Parameters
    ----------
    run : callable
        Returns the exit code.
    name : str, optional
        Starts each line.

    Returns
    -------
    code : int
        That of `run`, 2 for an error, 130 when interrupted.
    """

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"{name}: note: {message}", file=sys.stderr)

    warnings.showwarning = show
    try:
        return run()
    except KeyboardInterrupt:
        print(f"{name}: interrupted; what was measured is kept, the same command goes on from there", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"{name}: {error.name} is not installed; pip install 'perfkit[measure]' brings it", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
