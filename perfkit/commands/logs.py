"""``perfkit log``: is the bandwidth in a log of nccl-tests normal, and if not, why?"""

import json

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.diagnosis.result import Diagnosis
from perfkit.ground.targets import write_text
from perfkit.ground.units import escape


@click.command(
    "log",
    cls=Command,
    examples=[
        "perfkit log all_reduce.log",
        "perfkit log logs/ --platform h100-sxm-8x4 --report verdict.html",
        "perfkit log all_reduce.log --thresholds floors.csv",
    ],
)
@click.argument("source", metavar="FILE|FOLDER")
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
    source: str,
    platform: str | None,
    partial: bool,
    thresholds: str | None,
    report: str | None,
    json_file: str | None,
) -> int:
    """Say whether the bandwidth in logs of nccl-tests is normal, and if not, why.

    Exit code 0: as expected, or not enough to say; 1: slow, too good to be true, or wrong results; 2: no log.
    """
    files = OutputFiles(json_file, report, out=thresholds)
    files.check()
    if thresholds is not None and not thresholds.endswith((".csv", ".json")):
        raise ValueError(f"thresholds is {thresholds!r}; it must end with .csv or .json")
    diagnosis = pk.diagnose(source, platform, partial=partial)
    files.write(Answer(diagnosis.explain(), diagnosis.to_dict(), [diagnosis]))
    if thresholds is not None:
        path = write_text(thresholds, _write_thresholds(diagnosis, thresholds))
        if json_file != "-":
            print(f"written to {escape(path, 1000)}")
    return 1 if diagnosis.ok is False else 0


def _write_thresholds(diagnosis: Diagnosis, path: str) -> str:
    """The floors of a health check as text."""
    frame = diagnosis.thresholds()
    if not len(frame):
        raise ValueError(
            "thresholds cannot be written: nothing is expected of these logs; name a platform"
        )
    if path.endswith(".json"):
        return json.dumps(frame.to_dicts(), indent=1) + "\n"
    return frame.write_csv()
