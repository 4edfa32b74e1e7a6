"""``perfkit log``: is the bandwidth in a log of nccl-tests normal, and if not, why?"""

import json
import sys
import tempfile
from pathlib import Path

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.diagnosis.records import Word
from perfkit.diagnosis.result import Diagnosis, list_without_floors
from perfkit.ground.results import Table
from perfkit.ground.targets import write_text
from perfkit.ground.units import escape


@click.command(
    "log",
    cls=Command,
    examples=[
        "perfkit log all_reduce.log",
        "perfkit log monday.log tuesday.log",
        "perfkit log logs/ --platform h100-sxm-8x4 --report verdict.html",
        "perfkit log all_reduce.log --thresholds floors.csv",
    ],
)
@click.argument("sources", metavar="FILE|FOLDER|-", nargs=-1, required=True)
@click.option(
    "--platform",
    metavar="NAME",
    help="the system: a platform file or a name of the gallery; default: by the devices of the log",
)
@click.option(
    "--partial", is_flag=True, help="keep the rows of a log before a line that cannot be read"
)
@click.option(
    "--thresholds",
    metavar="FILE",
    help="floors of a health check to write, for each operation and size, as .csv or .json",
)
@options.report
@options.json_file
def log_command(
    sources: tuple[str, ...],
    platform: str | None,
    partial: bool,
    thresholds: str | None,
    report: str | None,
    json_file: str | None,
) -> int:
    """Say whether the bandwidth in logs of nccl-tests is normal, and if not, why. - is standard input.

    Exit code 0: as expected, or not enough to say; 1: slow, too good to be true, or wrong results; 2: no log,
    or a --platform that fits none of them.
    """
    files = OutputFiles(json_file, report, out=thresholds)
    files.check()
    if thresholds is not None and not thresholds.endswith((".csv", ".json")):
        raise ValueError(f"thresholds is {thresholds!r}; it must end with .csv or .json")
    diagnosis = _diagnose(sources, platform, partial=partial)
    files.write(Answer(diagnosis.explain(), diagnosis.to_dict(), [diagnosis]))
    if thresholds is not None:
        path = _write_thresholds(diagnosis, thresholds)
        if path is not None and json_file != "-":
            print(f"written to {escape(path, 1000)}")
    if diagnosis.ok is False:
        return 1
    if platform is not None and diagnosis.verdict == Word.UNKNOWN.value:
        return 2  # a check with a wrong platform would stay green for ever
    return 0


def _diagnose(sources: tuple[str, ...], platform: str | None, *, partial: bool) -> Diagnosis:
    """Judge the logs that the user names, or what stands on standard input."""
    if "-" not in sources:
        logs = sources[0] if len(sources) == 1 else list(sources)
        return pk.diagnose(logs, platform, partial=partial)
    if len(sources) > 1:
        raise ValueError("- is standard input, which is read alone; name it without other logs")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stdin.log"
        log.write_bytes(sys.stdin.buffer.read())
        return pk.diagnose(log, platform, partial=partial)


def _write_thresholds(diagnosis: Diagnosis, path: str) -> Path | None:
    """Write the floors of a health check, and say which runs have none. Where none has, that is an error
    of the call; after a verdict that is bad already it is said, and None is given."""
    frame = diagnosis.thresholds()
    for line in list_without_floors(diagnosis):
        print(f"no floors: {line}", file=sys.stderr)
    if len(frame):
        return write_text(path, _format_thresholds(frame, path))
    if diagnosis.ok is False:
        print("thresholds are not written: no run has floors", file=sys.stderr)
        return None
    raise ValueError(
        "thresholds cannot be written: it is not known what to expect of any run; name a platform"
    )


def _format_thresholds(frame: Table, path: str) -> str:
    """The floors of a health check as text."""
    if path.endswith(".json"):
        return json.dumps(frame.to_dicts(), indent=1) + "\n"
    return frame.write_csv()
