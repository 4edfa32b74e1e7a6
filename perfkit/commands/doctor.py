"""``perfkit doctor``: is this machine fit for a calibration?"""

from dataclasses import asdict

import click

from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.outputs import Answer, OutputFiles


@click.command(
    "doctor", cls=Command, examples=["perfkit doctor", "perfkit doctor --json findings.json"]
)
@options.json_file
def doctor_command(json_file: str | None) -> int:
    """Is this machine fit for a calibration? Exit code 1 if something would disturb it."""
    from perfkit.calibration.doctor import diagnose, format_findings

    files = OutputFiles(json_file)
    files.check()
    findings = diagnose()
    files.write(Answer(format_findings(findings), [asdict(finding) for finding in findings]))
    if any(finding.ok is False for finding in findings):
        return 1
    return 0
