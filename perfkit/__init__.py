"""How long will one training iteration take, and what limits it?

Names are resolved when they are first used, so that ``import perfkit`` costs next to nothing and loads no torch.

Examples
--------
>>> import perfkit as pk
>>> "predict" in dir(pk)
True
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfkit import fitting, models, plots, units, workloads
    from perfkit.campaign import calibrate, check
    from perfkit.estimates import Estimate
    from perfkit.fitting import Fit
    from perfkit.gallery import load_platform, platforms
    from perfkit.hardware import Device, Network
    from perfkit.platform import Platform
    from perfkit.prediction.comparison import Comparison
    from perfkit.prediction.contrast import PlatformComparison, compare
    from perfkit.prediction.result import Prediction, predict
    from perfkit.readers.table_configs import read_tables
    from perfkit.sharding.constraints import InfeasibleError
    from perfkit.sharding.planner import price_plan, shard
    from perfkit.sharding.result import PlanPrice, ShardingResult
    from perfkit.workloads.dlrm import DLRM
    from perfkit.workloads.placement import Placement, Plan
    from perfkit.workloads.recording import capture
    from perfkit.workloads.tables import EmbeddingTable, TableSet, draw_tables
    from perfkit.workloads.transformer import Transformer

__version__ = "0.1.0"

__all__ = [
    "DLRM",
    "Transformer",
    "EmbeddingTable",
    "TableSet",
    "draw_tables",
    "Placement",
    "Plan",
    "shard",
    "price_plan",
    "ShardingResult",
    "PlanPrice",
    "InfeasibleError",
    "load_platform",
    "platforms",
    "predict",
    "capture",
    "read_tables",
    "calibrate",
    "check",
    "compare",
    "Platform",
    "Device",
    "Network",
    "Estimate",
    "Fit",
    "Prediction",
    "Comparison",
    "PlatformComparison",
    "fitting",
    "models",
    "plots",
    "units",
    "workloads",
]

_HOMES = {
    "campaign": ("calibrate", "check"),
    "estimates": ("Estimate",),
    "fitting": ("Fit",),
    "gallery": ("load_platform", "platforms"),
    "hardware": ("Device", "Network"),
    "platform": ("Platform",),
    "prediction.comparison": ("Comparison",),
    "prediction.contrast": ("PlatformComparison", "compare"),
    "prediction.result": ("Prediction", "predict"),
    "readers.table_configs": ("read_tables",),
    "sharding.constraints": ("InfeasibleError",),
    "sharding.planner": ("price_plan", "shard"),
    "sharding.result": ("PlanPrice", "ShardingResult"),
    "workloads.dlrm": ("DLRM",),
    "workloads.placement": ("Placement", "Plan"),
    "workloads.recording": ("capture",),
    "workloads.tables": ("EmbeddingTable", "TableSet", "draw_tables"),
    "workloads.transformer": ("Transformer",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'perfkit' has no attribute {name!r}")
    home = _HOME.get(name)
    value = import_module(f"perfkit.{name}") if home is None else getattr(import_module(f"perfkit.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
