"""Workloads by the name of a preset."""

import re
from typing import Any

from perfkit.ground.units import check_choice, show
from perfkit.workloads import dlrm, transformer
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.encoder_decoders import explain_name
from perfkit.workloads.transformer import Transformer

#: Most names that are proposed for an unknown one [-].
_MOST_ALIKE = 6


def build_workload(name: str, **changes: Any) -> DLRM | Transformer:
    """Make the workload of a preset with some of its fields changed.

    Parameters
    ----------
    name : str
        One of `perfkit.workloads.dlrm.PRESETS` and `perfkit.workloads.transformer.PRESETS`, or a name of
        the Hub whose last part is one, such as ``Qwen/Qwen3-8B``.
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
    known = [*dlrm.PRESETS, *transformer.PRESETS]
    of_hub = name.rpartition("/")[2].lower()
    if "/" in name and of_hub in known:
        name = of_hub
    if name not in known:
        parts = _list_parts(name)
        alike = [one for one in known if _list_parts(one)[: len(parts)] == parts]
        if parts and alike:
            listed = ", ".join(alike[:_MOST_ALIKE])
            raise ValueError(
                f"model is {show(name)}; did you mean {listed}? perfkit models lists all"
            )
    check_choice("model", name, known)
    if name in transformer.PRESETS:
        return Transformer.preset(name, **changes)
    return DLRM(name, **changes)


def _list_parts(name: str) -> list[str]:
    """Words and numbers of a name without the dashes and dots in which people differ.

    Examples
    --------
    >>> _list_parts("Llama3"), _list_parts("llama-3-8b")
    (['llama', '3'], ['llama', '3', '8', 'b'])
    """
    return re.findall("[a-z]+|[0-9]+", name.lower())


def find_workload(workload: Any) -> Any:
    """The workload of a name; anything else as it is.

    Examples
    --------
    >>> find_workload("bert-base").layers, find_workload("Qwen/Qwen3-8B").layers
    (12, 36)
    """
    return build_workload(workload) if isinstance(workload, str) else workload
