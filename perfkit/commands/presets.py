"""Workloads by the name of a preset."""

from typing import Any

import perfkit as pk
from perfkit.ground.units import check_choice
from perfkit.workloads import dlrm, transformer
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.encoder_decoders import explain_name
from perfkit.workloads.transformer import Transformer


def build_workload(name: str, **changes: Any) -> DLRM | Transformer:
    """Make the workload of a preset with some of its fields changed."""
    apart = explain_name(name)
    if apart is not None:
        raise ValueError(f"model is {apart}")
    check_choice("model", name, [*dlrm.PRESETS, *transformer.PRESETS])
    if name in transformer.PRESETS:
        return pk.Transformer.preset(name, **changes)
    return pk.DLRM(name, **changes)
