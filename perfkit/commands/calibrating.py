"""``perfkit calibrate``: a platform file from measurements of this machine, or of others."""

import signal
import warnings
from datetime import date

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.options import WHOLE, keep_given, refuse_given
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.ground.files import check_path
from perfkit.ground.targets import check_target
from perfkit.ground.units import format_table
from perfkit.measure.launchers import LaunchedRanks, launched_ranks
from perfkit.platform.platform import Platform

#: What a calibration of GPUs left as it was, by the name in the provenance.
_LEFT = ("as in the base", "host", "not in the traces", "without a time")
_FOR_LOGS = "it is for logs, which --from-nccl-logs names"
_FOR_MEASURING = "it is for measuring this machine, and what was measured elsewhere is named"
_ONE_SOURCE = "another source is named, and one is fitted at a time"


@click.command(
    "calibrate",
    cls=Command,
    examples=[
        "perfkit calibrate --out mine.toml",
        "perfkit calibrate --from-nccl-logs logs/ --base h100-sxm-8 --out cluster.toml",
        "perfkit calibrate --sbatch --nodes 2 --gpus-per-node 8 --out mine.toml",
    ],
    measures=True,
)
@click.option("--out", metavar="FILE", required=True, help="platform file to write, NAME.toml")
@click.option("--device", type=click.Choice(("cpu", "cuda")), help="what to measure; default cpu")
@click.option("--ranks", type=WHOLE, help="ranks that measure collectives; default 2, of GPUs all")
@click.option("--quick", is_flag=True, help="measure fewer sizes of a CPU, in two to three minutes")
@click.option(
    "--stop-early",
    is_flag=True,
    help="measure a CPU in about half the time, until its fits no longer move",
)
@options.models
@click.option(
    "--measurements",
    metavar="FILE",
    help="measure nothing: fit the raw measurements of a calibration",
)
@click.option(
    "--from-nccl-logs",
    metavar="DIR",
    help="measure nothing: fit logs of nccl-tests, a file or a folder",
)
@click.option(
    "--ranks-per-node",
    type=WHOLE,
    help="ranks per node of the logs; default: that of the logs or of --base",
)
@click.option(
    "--partial", is_flag=True, help="keep the rows of a log before a line that cannot be read"
)
@click.option(
    "--from-kernel-database",
    metavar="SYSTEM",
    help="measure nothing: fit data of aiconfigurator-core",
)
@click.option(
    "--traces",
    metavar="FILE...",
    multiple=True,
    help="measure nothing: fit kernels of recorded steps into --base",
)
@click.option(
    "--base",
    metavar="NAME",
    help="platform for all parts that are not fitted; default: the gallery's node",
)
@click.option(
    "--rehearse",
    is_flag=True,
    help="go the way of --device cuda on all ranks without a GPU; times are those of --base",
)
@click.option(
    "--sbatch",
    is_flag=True,
    help="only print the script of a Slurm job for --nodes and --gpus-per-node",
)
@click.option("--nodes", type=WHOLE, help="nodes of the job that --sbatch prints")
@click.option("--gpus-per-node", type=WHOLE, help="GPUs of each of them")
@options.json_file
def calibrate_command(
    out: str,
    device: str | None,
    ranks: int | None,
    quick: bool,
    stop_early: bool,
    models: str | None,
    measurements: str | None,
    from_nccl_logs: str | None,
    ranks_per_node: int | None,
    partial: bool,
    from_kernel_database: str | None,
    traces: tuple[str, ...],
    base: str | None,
    rehearse: bool,
    sbatch: bool,
    nodes: int | None,
    gpus_per_node: int | None,
    json_file: str | None,
) -> int:
    """Measure this machine, or fit existing measurements, and write a platform file.

    With --device cuda every rank of torchrun, srun or mpirun runs the same line; rank 0 prints and
    writes. GPUs were measured one at a time. The way over several ranks and nodes is proven by
    --rehearse, with gloo between processes of one machine, under torchrun and a stand-in for srun;
    it has not run on several GPUs, nor under Slurm or mpirun themselves.
    """
    if rehearse and device is None:
        device = "cuda"
    if sbatch:
        refuse_given(
            "--sbatch prints a job that measures GPUs",
            measurements=measurements,
            from_nccl_logs=from_nccl_logs,
            from_kernel_database=from_kernel_database,
            traces=traces or None,
            ranks=ranks,
            quick=quick,
            stop_early=stop_early,
            models=models,
            partial=partial,
            ranks_per_node=ranks_per_node,
            json=json_file,
        )
        return _print_job(out, base, nodes, gpus_per_node, device, rehearse)
    refuse_given("it is for the job that --sbatch prints", nodes=nodes, gpus_per_node=gpus_per_node)
    names_others = from_nccl_logs is not None or from_kernel_database is not None
    fits_recorded = bool(traces) or measurements is not None
    assembles = names_others or (base is not None and device != "cuda" and not fits_recorded)
    measures = not assembles and not fits_recorded
    launched = launched_ranks()
    if launched is not None and launched.rank > 0:
        return _follow(launched, measures=measures)
    files = OutputFiles(json_file, out=out)
    files.check()
    if from_nccl_logs is None:
        refuse_given(_FOR_LOGS, partial=partial, ranks_per_node=ranks_per_node)
    if assembles:
        refuse_given(_ONE_SOURCE, traces=traces or None, measurements=measurements)
    elif traces:
        refuse_given(_ONE_SOURCE, measurements=measurements)
    if not measures:
        refuse_given(
            _FOR_MEASURING,
            device=device,
            ranks=ranks,
            quick=quick,
            stop_early=stop_early,
            models=models,
            rehearse=rehearse,
        )
    if assembles:
        answer = _assemble(out, base, from_nccl_logs, ranks_per_node, partial, from_kernel_database)
        files.write(answer)
        return 0
    platform = pk.calibrate(
        out=out,
        base=base,
        ranks=ranks,
        quick=quick,
        stop_early=stop_early,
        measurements=measurements,
        traces=list(traces) or None,
        rehearse=rehearse,
        **keep_given(device=device, models=models),
    )
    lines = [repr(platform), *_describe_measured(platform)]
    for name in _LEFT:
        if platform.provenance.get(name):
            lines.append(f"{name}: {platform.provenance[name]}")
    if platform.is_rehearsed:
        lines.append(
            "a rehearsal: nothing was timed, every number is what the base predicts; to measure, "
            "calibrate without --rehearse"
        )
    written = f"written to {out}"
    if not measurements and not traces:
        written += ", its raw measurements are in the same folder"
    lines.append(written)
    files.write(Answer("\n".join(lines), platform.numbers().to_dicts()))
    return 0


def _print_job(
    out: str,
    base: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    device: str | None,
    rehearse: bool,
) -> int:
    """Print the script of a Slurm job."""
    from perfkit.calibration.job_scripts import write_job

    if device == "cpu":
        raise ValueError("device is 'cpu'; --sbatch prints a job that measures GPUs; leave it out")
    if nodes is None or gpus_per_node is None:
        missing = "nodes" if nodes is None else "gpus_per_node"
        raise ValueError(
            f"{missing} is missing; say how large the job is: --sbatch --nodes 2 --gpus-per-node 8"
        )
    check_target("out", out, ".toml")
    if base is not None:
        pk.load_platform(base)
    job = write_job(nodes=nodes, gpus_per_node=gpus_per_node, out=out, base=base, rehearse=rehearse)
    print(job, end="")
    return 0


def _follow(launched: LaunchedRanks, *, measures: bool) -> int:
    """Do what rank 0 asks for, silently, and return its exit code. Rank 0 alone prints, and it alone
    reads files where nothing is measured."""
    from perfkit.measure.follower import Follower

    if not measures:
        return 0
    warnings.simplefilter("ignore")  # each rank would repeat those of rank 0
    try:
        return Follower(launched).work().code
    except KeyboardInterrupt as interrupt:  # all ranks are interrupted, and rank 0 says so
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)


def _describe_measured(platform: Platform) -> list[str]:
    """A line about the fits of a calibration of GPUs that are its own."""
    source = platform.provenance.get("id")
    if not source or "as in the base" not in platform.provenance:
        return []
    fits = {**platform.kernels, **platform.collectives}
    names = [name for name, fit in fits.items() if fit.source.startswith(source)]
    return [f"measured: {', '.join(names)}"] if names else []


def _assemble(
    out: str,
    base_name: str | None,
    nccl_logs: str | None,
    ranks_per_node: int | None,
    partial: bool,
    kernel_database: str | None,
) -> Answer:
    """Make a platform from measurements of others, without measuring this machine."""
    from perfkit.platform.sources import assemble_sources, find_base

    path = check_target("out", out, ".toml")
    if nccl_logs is not None:
        check_path("from_nccl_logs", nccl_logs)
    if kernel_database == "":
        raise ValueError("from_kernel_database is ''; it is empty; name a system, such as h200_sxm")
    if nccl_logs is None and kernel_database is None:
        raise ValueError(
            "base is given; name the data to fit: --from-nccl-logs, --from-kernel-database, or both"
        )
    base = find_base(kernel_database) if base_name is None else pk.load_platform(base_name)
    platform = assemble_sources(
        base,
        name=path.stem,
        nccl_logs=nccl_logs,
        kernel_database=kernel_database,
        partial=partial,
        ranks_per_node=ranks_per_node,
        date=date.today().isoformat(),
        progress=True,
    )
    platform.save(path)
    lines = [*_describe_fits(platform, base), repr(platform), f"written to {path}"]
    return Answer("\n".join(lines), platform.numbers().to_dicts())


def _describe_fits(platform: Platform, base: Platform) -> list[str]:
    """Lines about the fits that differ from those of the base."""
    fits_of_base = {**base.kernels, **base.collectives}
    fits = {**platform.kernels, **platform.collectives}
    new = {name: fit for name, fit in fits.items() if fit != fits_of_base.get(name)}
    lines = []
    if not new:
        lines.append(f"nothing differs from {base.name}")
    rows = [("fitted", "form", "spread", "points", "source")]
    for name, fit in new.items():
        rows.append((name, fit.form, f"{fit.spread:.0%}", f"{fit.n}", fit.source))
    lines.append(format_table(rows))
    for name, fit in new.items():
        if fit.quality == "poor":
            lines.append(f"{name}: poor fit, {'; '.join(fit.notes)}")
    return lines
