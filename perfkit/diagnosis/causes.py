"""Signatures of known faults: why a run is slow or too good, with evidence and what to try."""

from perfkit.diagnosis.records import Case, Cause


def find_causes(case: Case) -> tuple[Cause, ...]:
    """Look for the causes of what a run shows.

    Parameters
    ----------
    case : Case
        The run, with its verdicts.

    Returns
    -------
    causes : tuple of Cause
        The surest and most telling one first; none where no signature fits.
    """
    return ()
