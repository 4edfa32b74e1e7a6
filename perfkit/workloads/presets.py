"""Workloads by the name of a preset."""

from typing import Any

from perfkit.ground.units import check_choice
from perfkit.workloads import dlrm, transformer
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.encoder_decoders import explain_name
from perfkit.workloads.transformer import Transformer


def build_workload(name: str, **changes: Any) -> DLRM | Transformer:
    """Make the workload of a preset with some of its fields changed.

    Parameters
    ----------
    name : str
        One of `perfkit.workloads.dlrm.PRESETS` and `perfkit.workloads.transformer.PRESETS`.
    **changes : object
        Fields, as `DLRM` and `Transformer` take them.

    Returns
    -------
    workload : DLRM or Transformer
        The preset with these fields.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    apart = explain_name(name)
    if apart is not None:
        raise ValueError(f"model is {apart}")
    check_choice("model", name, [*dlrm.PRESETS, *transformer.PRESETS])
    if name in transformer.PRESETS:
        return Transformer.preset(name, **changes)
    return DLRM(name, **changes)


def find_workload(workload: Any) -> Any:
    """The workload of a name; anything else as it is.

    Examples
    --------
    >>> find_workload("bert-base").layers
    12
    """
    return build_workload(workload) if isinstance(workload, str) else workload
