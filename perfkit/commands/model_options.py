"""Options that say what is trained and how ranks share it, and the workload that they describe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import perfkit as pk
from perfkit.commands.options import NUMBER, WHOLE, keep_given, refuse_given
from perfkit.ground.units import show
from perfkit.workloads import dlrm, transformer
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.presets import build_workload
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

_Function = Callable[..., Any]


@dataclass(frozen=True)
class Setting:
    """An option whose name is that of a field: `micro_batch` is `--micro-batch`.

    Parameters
    ----------
    name : str
        The field.
    help : str
        What the help says of it.
    type : click.ParamType, optional
        How its value is read; None for text.
    is_flag : bool, optional
        Whether it has no value.
    without_value : str, optional
        Its value where no word follows; None where one has to.
    metavar : str, optional
        What the help shows for the value.
    """

    name: str
    help: str
    type: click.ParamType | None = None
    is_flag: bool = False
    without_value: str | None = None
    metavar: str | None = None

    def add_to(self, function: _Function) -> _Function:
        """Give the option to a command."""
        option = f"--{self.name.replace('_', '-')}"
        if self.is_flag:
            return click.option(option, is_flag=True, help=self.help)(function)
        if self.without_value is None:
            decorate = click.option(option, type=self.type, metavar=self.metavar, help=self.help)
        else:
            decorate = click.option(
                option,
                type=self.type,
                metavar=self.metavar,
                help=self.help,
                is_flag=False,
                flag_value=self.without_value,
            )
        return decorate(function)


_WHICH_MODELS = "preset, see perfkit models; or a config.json of Hugging Face, or its folder"

_OF_EVERY_MODEL = (
    Setting("batch", "samples or sequences over all ranks; default: that of the model", WHOLE),
    Setting("dtype", "fp64, fp32, tf32, bf16, fp16, fp8, as far as the device has it"),
    Setting("mixed", "weights stay fp32, products run in --dtype", is_flag=True),
)

_OF_TRANSFORMERS = (
    Setting("sequence", "tokens of one sequence", WHOLE),
    Setting("optimizer", "what updates the weights; default adamw"),
    Setting("fused", "one kernel updates many weights (fused=True)", is_flag=True),
    Setting("optimizer_in_backward", "each weight is updated with its gradient", is_flag=True),
    Setting("lora_rank", "train adapters of this rank alone (LoRA)", WHOLE),
    Setting(
        "lora_modules",
        "matrices with adapters, such as q_proj,v_proj; default: all-linear",
        metavar="NAMES",
    ),
    Setting("frozen_format", "format of frozen weights beside --lora-rank: nf4, nf4-dq"),
    Setting("loss_chunks", "parts of the tokens of which the loss is taken in turn", WHOLE),
)

_OF_DLRMS = (
    Setting(
        "embedding", "kernels of tables: separate, fused, exact (one for all tables, as FBGEMM)"
    ),
    Setting("overlap", "exchanges and reductions run beside kernels (overlap=True)", is_flag=True),
    Setting("table_optimizer", "what updates rows of exact tables, as rowwise_adagrad"),
    Setting("weighted", "each lookup has a weight (weighted=True)", is_flag=True),
    Setting(
        "pipeline",
        "how inputs arrive: local (no part of the step), serial, base, sparse_dist (TorchRec's)",
    ),
)

#: Fields of a `Transformer` and of a `Strategy` alike.
_OF_BOTH = (
    Setting(
        "checkpoint",
        "compute layers again in the backward pass: full where no name follows, selective, ...",
        without_value="full",
        metavar="[NAME]",
    ),
    Setting("checkpoint_layers", "layers that --checkpoint is for; default: all", WHOLE),
    Setting("checkpoint_group", "layers that --checkpoint computes again at once", WHOLE),
)

#: Fields of a `Transformer` that a `Strategy` replaces.
_WITHOUT_STRATEGY = (
    Setting("parallel", "what ranks divide: ddp (nothing, the default), zero1, zero2, fsdp"),
    Setting("accumulate", "micro-batches per rank; they share the batch", WHOLE),
)

_OF_STRATEGIES = (
    Setting("tp", "ranks that share products (tensor parallel)", WHOLE),
    Setting("pp", "stages of layers (pipeline parallel)", WHOLE),
    Setting("dp", "replicas of the model; default: --ranks over tp x pp x cp", WHOLE),
    Setting("cp", "ranks that share the tokens of a sequence (context parallel)", WHOLE),
    Setting("cp_kind", "how ranks of cp share them: ring, all_gather, ulysses"),
    Setting("ep", "replicas that share the experts (expert parallel)", WHOLE),
    Setting("micro_batch", "sequences of a replica in one pass", WHOLE),
    Setting("schedule", "order of passes: gpipe, 1f1b, interleaved, zero_bubble, ..."),
    Setting("chunks", "chunks of each stage, of interleaved", WHOLE),
    Setting("first_layers", "layers of the first stage; default: as many as others", WHOLE),
    Setting("last_layers", "layers of the last stage; default: as many as others", WHOLE),
    Setting("zero", "what replicas share: 0 nothing, 1 states, 2 gradients, 3 weights", WHOLE),
    Setting("shards", "replicas that share it, as HSDP does; default: all", WHOLE),
    Setting("sequence_parallel", "ranks of tp share tokens, too", is_flag=True),
    Setting("offload", "what lies in the memory of the host: optimizer, parameters, activations"),
    Setting("host_threads", "threads of a rank that update on the host", WHOLE),
    Setting("offload_fraction", "share of the optimizer that lies there; default: all", NUMBER),
)


def takes_model(function: _Function) -> _Function:
    """Give a command the options that say what is trained."""
    function = _add(function, (*_OF_EVERY_MODEL, *_OF_TRANSFORMERS, *_OF_DLRMS))
    return click.option("--model", required=True, help=_WHICH_MODELS)(function)


def may_take_model(function: _Function) -> _Function:
    """The same for a command that needs no model."""
    function = _add(function, (*_OF_EVERY_MODEL, *_OF_TRANSFORMERS, *_OF_DLRMS))
    return click.option("--model", help=_WHICH_MODELS)(function)


def takes_sharing(function: _Function) -> _Function:
    """Give a command the options that say how ranks share a Transformer."""
    return _add(function, (*_WITHOUT_STRATEGY, *_OF_STRATEGIES, *_OF_BOTH))


@dataclass(frozen=True)
class Described:
    """What the options of a command describe.

    Parameters
    ----------
    workload : DLRM or Transformer
        The iteration.
    strategy : Strategy, optional
        How ranks share it; None where no option of a strategy is given.
    """

    workload: DLRM | Transformer
    strategy: Strategy | None = None


def describe(values: Mapping[str, Any], ranks: int | None) -> Described:
    """Make the workload and the strategy of a command that has `takes_model` and
    `takes_sharing`.

    Parameters
    ----------
    values : mapping
        What click read, None or False where an option is not given.
    ranks : int, optional
        Ranks that a strategy without ``--dp`` takes; None where it shall have the fewest replicas that it may
        have, as more are added later [-].

    Raises
    ------
    ValueError
        For options that do not go together, and those that the model does not have.
    """
    of_strategy = _take(_OF_STRATEGIES, values)
    of_sharing = _take(_OF_BOTH, values)
    without_strategy = _take(_WITHOUT_STRATEGY, values)
    if values["model"] in dlrm.PRESETS:
        refuse_given("a DLRM has none", **of_sharing, **without_strategy, **of_strategy)
        return Described(build_model(values))
    if not of_strategy:
        return Described(build_model(values, **of_sharing, **without_strategy))
    refuse_given("options such as --tp, --dp and --zero say how ranks share", **without_strategy)
    if "dp" not in of_strategy:
        if ranks is None:
            of_strategy["dp"] = max(of_strategy.get("shards", 1), 1)
        else:
            of_strategy["dp"] = _count_replicas(of_strategy, ranks)
    return Described(build_model(values), pk.Strategy(**of_sharing, **of_strategy))


def _count_replicas(of_strategy: Mapping[str, Any], ranks: int) -> int:
    """Replicas of a strategy that takes all ranks.

    Examples
    --------
    >>> _count_replicas({"tp": 2, "zero": 3}, 64)
    32
    """
    ranks_of_replica = 1
    for name in ("tp", "pp", "cp"):
        ranks_of_replica *= of_strategy.get(name, 1)
    if ranks_of_replica < 1:
        return 1  # a strategy refuses such numbers
    if ranks % ranks_of_replica:
        raise ValueError(
            f"--tp x --pp x --cp is {ranks_of_replica}, which does not divide the {ranks} ranks; "
            "give --dp, the replicas of the model, too, or other numbers"
        )
    return ranks // ranks_of_replica


def refuse_model_options(values: Mapping[str, Any]) -> None:
    """Refuse options of a model, and how ranks share it, where none is named."""
    of_model = (*_OF_EVERY_MODEL, *_OF_TRANSFORMERS, *_OF_DLRMS)
    of_sharing = (*_WITHOUT_STRATEGY, *_OF_STRATEGIES, *_OF_BOTH)
    given = _take((*of_model, *of_sharing), values)
    refuse_given("it says something of --model, which is not named", **given)


def build_model(values: Mapping[str, Any], **changes: Any) -> DLRM | Transformer:
    """Make the workload of a command that has `takes_model`.

    Parameters
    ----------
    values : mapping
        What click read, None or False where an option is not given.
    **changes : Any
        Further fields of a Transformer.

    Raises
    ------
    ValueError
        For an unknown model, and for options that it does not have.
    """
    name = values["model"]
    of_model = _take(_OF_EVERY_MODEL, values)
    of_transformer = _take(_OF_TRANSFORMERS, values)
    of_dlrm = _take(_OF_DLRMS, values)
    if name in dlrm.PRESETS:
        refuse_given("a DLRM has none", **of_transformer)
        return build_workload(name, **of_model, **of_dlrm)
    refuse_given("a Transformer has none", **of_dlrm)
    modules = of_transformer.get("lora_modules")
    if modules is not None and "," in modules:
        of_transformer["lora_modules"] = [module.strip() for module in modules.split(",")]
    fields = {**of_model, **of_transformer, **changes}
    if _is_path(name):
        _name_preset(name)
        return pk.Transformer.from_config(name, **fields)
    return build_workload(name.rpartition("/")[2].lower(), **fields)


def _is_path(name: str) -> bool:
    """Whether a model is read from a file or its folder. A preset is that of its name, whatever lies in
    the working folder; names of the Hub have a slash, as paths."""
    if name in transformer.PRESETS:
        return False
    if Path(name).exists() or name.endswith(".json"):
        return True
    # of the Hub, as meta-llama/Llama-3-8B, the last part may be that of a preset
    return "/" in name and name.rpartition("/")[2].lower() not in transformer.PRESETS


def _name_preset(name: str) -> None:
    """Refuse a name of the Hub that is no file and begins or ends with that of a preset."""
    last = name.rpartition("/")[2].lower()
    contained = [preset for preset in transformer.PRESETS if preset in last]
    if contained and not Path(name).exists() and not last.endswith(".json"):
        nearest = max(contained, key=len)
        raise ValueError(
            f"model is {show(name)}, which is no file and no preset; did you mean {nearest}? Or name the "
            "config.json of a model, or its folder"
        )


def _add(function: _Function, settings: Sequence[Setting]) -> _Function:
    """Give a command some options, in the order in which its help shows them."""
    for setting in reversed(settings):
        function = setting.add_to(function)
    return function


def _take(settings: Sequence[Setting], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of those of some settings that are given."""
    return keep_given(**{setting.name: values[setting.name] for setting in settings})
