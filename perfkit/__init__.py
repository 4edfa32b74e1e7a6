"""How long will one training iteration take, and what limits it?

Names are resolved when they are first used, so that ``import perfkit`` costs next to nothing and
loads no torch.

Examples
--------
>>> import perfkit as pk
>>> "predict" in dir(pk)
True
"""

import perfkit.ground.interrupts  # isort: split

perfkit.ground.interrupts.end_quietly()  # first, as imports take long

from importlib import import_module
from typing import TYPE_CHECKING

import perfkit.ground.forks  # it watches forks from the beginning
from perfkit.ground.version import __version__

if TYPE_CHECKING:  # the public names, which are imported when they are first used
    from perfkit import fitting, models, plots, workloads
    from perfkit.calibration.campaign import calibrate, check
    from perfkit.calibration.checks import Comparison
    from perfkit.calibration.runs import Tuning, tune
    from perfkit.calibration.traces import Trace, read_trace
    from perfkit.diagnosis.diagnosis import diagnose
    from perfkit.diagnosis.result import Diagnosis
    from perfkit.exploration.decisions import allocate, scaling, solve_for
    from perfkit.exploration.measuring import MissingMeasurements, what_to_measure
    from perfkit.exploration.strategies import Exploration, explore
    from perfkit.exploration.sweeps import Sweep, sweep
    from perfkit.fitting import Fit
    from perfkit.ground import units
    from perfkit.ground.frames import ResultFrame
    from perfkit.ground.hardware import Device, Network
    from perfkit.measure.timing import time_loader
    from perfkit.platform.estimates import Estimate, ExtrapolationWarning
    from perfkit.platform.gallery import load_platform, platforms
    from perfkit.platform.node_networks import fabrics
    from perfkit.platform.platform import Platform
    from perfkit.prediction.against import Deviation
    from perfkit.prediction.contrast import PlatformComparison, compare
    from perfkit.prediction.goodput import Goodput
    from perfkit.prediction.predictor import predict
    from perfkit.prediction.recordings import record
    from perfkit.prediction.result import Prediction
    from perfkit.readers.measured_steps import MeasuredStep
    from perfkit.readers.printed_plans import read_plan
    from perfkit.readers.table_configs import read_tables
    from perfkit.readers.torchrec_models import read_parameter_constraints
    from perfkit.readers.training_logs import TrainingLog, read_training_log, read_training_logs
    from perfkit.recording.steps import capture
    from perfkit.reports.page import report
    from perfkit.sharding.judging import PlanJudgement, judge_plan
    from perfkit.sharding.planner import InfeasibleError, price_plan, shard
    from perfkit.sharding.result import PlanPrice, ShardingResult
    from perfkit.workloads.dlrm import DLRM
    from perfkit.workloads.graph import Graph
    from perfkit.workloads.placement import Placement, Plan, take_kernels
    from perfkit.workloads.stack import Stack, find_stack, stacks
    from perfkit.workloads.strategy import Strategy
    from perfkit.workloads.tables import EmbeddingTable, TableSet, draw_tables
    from perfkit.workloads.transformer import Transformer

#: Module of each public name; the imports above say the same to tools that read types.
_HOME = {
    "fitting": "perfkit",
    "models": "perfkit",
    "plots": "perfkit",
    "workloads": "perfkit",
    "calibrate": "perfkit.calibration.campaign",
    "check": "perfkit.calibration.campaign",
    "Comparison": "perfkit.calibration.checks",
    "Tuning": "perfkit.calibration.runs",
    "tune": "perfkit.calibration.runs",
    "Trace": "perfkit.calibration.traces",
    "read_trace": "perfkit.calibration.traces",
    "diagnose": "perfkit.diagnosis.diagnosis",
    "Diagnosis": "perfkit.diagnosis.result",
    "allocate": "perfkit.exploration.decisions",
    "scaling": "perfkit.exploration.decisions",
    "solve_for": "perfkit.exploration.decisions",
    "MissingMeasurements": "perfkit.exploration.measuring",
    "what_to_measure": "perfkit.exploration.measuring",
    "Exploration": "perfkit.exploration.strategies",
    "explore": "perfkit.exploration.strategies",
    "Sweep": "perfkit.exploration.sweeps",
    "sweep": "perfkit.exploration.sweeps",
    "Fit": "perfkit.fitting",
    "units": "perfkit.ground",
    "ResultFrame": "perfkit.ground.frames",
    "Device": "perfkit.ground.hardware",
    "Network": "perfkit.ground.hardware",
    "time_loader": "perfkit.measure.timing",
    "Estimate": "perfkit.platform.estimates",
    "ExtrapolationWarning": "perfkit.platform.estimates",
    "load_platform": "perfkit.platform.gallery",
    "platforms": "perfkit.platform.gallery",
    "fabrics": "perfkit.platform.node_networks",
    "Platform": "perfkit.platform.platform",
    "Deviation": "perfkit.prediction.against",
    "PlatformComparison": "perfkit.prediction.contrast",
    "compare": "perfkit.prediction.contrast",
    "Goodput": "perfkit.prediction.goodput",
    "predict": "perfkit.prediction.predictor",
    "record": "perfkit.prediction.recordings",
    "Prediction": "perfkit.prediction.result",
    "MeasuredStep": "perfkit.readers.measured_steps",
    "read_plan": "perfkit.readers.printed_plans",
    "read_tables": "perfkit.readers.table_configs",
    "read_parameter_constraints": "perfkit.readers.torchrec_models",
    "TrainingLog": "perfkit.readers.training_logs",
    "read_training_log": "perfkit.readers.training_logs",
    "read_training_logs": "perfkit.readers.training_logs",
    "capture": "perfkit.recording.steps",
    "report": "perfkit.reports.page",
    "PlanJudgement": "perfkit.sharding.judging",
    "judge_plan": "perfkit.sharding.judging",
    "InfeasibleError": "perfkit.sharding.planner",
    "price_plan": "perfkit.sharding.planner",
    "shard": "perfkit.sharding.planner",
    "PlanPrice": "perfkit.sharding.result",
    "ShardingResult": "perfkit.sharding.result",
    "DLRM": "perfkit.workloads.dlrm",
    "Graph": "perfkit.workloads.graph",
    "Placement": "perfkit.workloads.placement",
    "Plan": "perfkit.workloads.placement",
    "take_kernels": "perfkit.workloads.placement",
    "Stack": "perfkit.workloads.stack",
    "find_stack": "perfkit.workloads.stack",
    "stacks": "perfkit.workloads.stack",
    "Strategy": "perfkit.workloads.strategy",
    "EmbeddingTable": "perfkit.workloads.tables",
    "TableSet": "perfkit.workloads.tables",
    "draw_tables": "perfkit.workloads.tables",
    "Transformer": "perfkit.workloads.transformer",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'perfkit' has no attribute {name!r}")
    if "recording" in _HOME[name]:
        import_module("perfkit.recording").check_torch()
    known = vars(import_module(_HOME[name]))
    value = known[name] if name in known else import_module(f"{_HOME[name]}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
