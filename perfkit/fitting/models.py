"""Fitted models: of kernels, of collectives, and of what real iterations add, each with its
parameters and one closed form."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from perfkit.fitting.parameters import Fit, Parameter
from perfkit.ground.units import Array, Values
from perfkit.models import collectives as forms
from perfkit.models.embedding import lookup_time
from perfkit.models.kernels import TERMS, additive
from perfkit.models.roofline import (
    attention_work,
    roofline_time,
    round_up,
    rowwise_time,
    sequential_time,
)

#: Sizes of kernels by name, in base units: arrays that broadcast, with the ``peak`` [FLOP/s] and the
#: ``bandwidth`` [B/s] of the device.
Sizes = Mapping[str, Array]

# Kernels.


class KernelModel(Fit):
    """Time of kernels of one class, alone on the device."""

    @staticmethod
    @abstractmethod
    def evaluate(sizes: Sizes, **parameters: Values) -> Array:
        """Times of kernels [s] for parameters by name, which may be arrays."""

    def time(self, sizes: Sizes) -> Array:
        """Times of kernels.

        Parameters
        ----------
        sizes : mapping of str to array
            What the form needs, in base units: ``flops``, ``nbytes``, ``peak`` and ``bandwidth`` of
            a roofline, the sizes of its terms for a sum.

        Returns
        -------
        time : array
            One time per kernel [s].
        """
        return self.evaluate(sizes, **self.values_by_name)

    @abstractmethod
    def split(self, sizes: Sizes) -> dict[str, Array]:
        """Parts that sum to `time`, by name [s]; an account of a time shows them."""


@dataclass(frozen=True, eq=False, repr=False)
class Roofline(KernelModel):
    """Launch time plus a smooth maximum of arithmetic and memory traffic.

    Parameters
    ----------
    launch : Parameter
        Time of an empty kernel [s].
    compute_efficiency, memory_efficiency : Parameter
        Share of the peak and of the memory bandwidth that large kernels reach [-].
    sharpness : Parameter
        Exponent of the smooth maximum [-].
    """

    form: ClassVar[str] = "roofline"
    equation: ClassVar[str] = (
        "t = launch + ((flops / (e peak))^q + (bytes / (e bandwidth))^q)^(1/q)"
    )

    launch: Parameter
    compute_efficiency: Parameter
    memory_efficiency: Parameter
    sharpness: Parameter

    @staticmethod
    def evaluate(sizes: Sizes, **parameters: Values) -> Array:
        """Times of kernels [s] for parameters by name, which may be arrays."""
        launch, sharpness = parameters["launch"], parameters["sharpness"]
        bandwidth = parameters["memory_efficiency"] * sizes["bandwidth"]
        if not np.any(sizes["flops"]):
            return np.asarray(launch + sizes["nbytes"] / bandwidth)
        rates: dict[str, Any] = {
            "peak": parameters["compute_efficiency"] * sizes["peak"],
            "bandwidth": bandwidth,
            "launch": launch,
            "sharpness": sharpness,
        }
        return np.asarray(roofline_time(sizes["flops"], sizes["nbytes"], **rates))

    def split(self, sizes: Sizes) -> dict[str, Array]:
        """Parts that sum to `time`: the launch, the larger of arithmetic and memory traffic, and
        what the smaller one adds, because they do not overlap completely [s]."""
        launch = np.asarray(self["launch"])
        arithmetic = self.count_flops(sizes) / (self["compute_efficiency"] * sizes["peak"])
        traffic = sizes["nbytes"] / (self["memory_efficiency"] * sizes["bandwidth"])
        return {
            "launch": launch,
            "arithmetic": np.where(arithmetic > traffic, arithmetic, 0.0),
            "memory traffic": np.where(arithmetic > traffic, 0.0, traffic),
            "what does not overlap": self.time(sizes) - launch - np.maximum(arithmetic, traffic),
        }

    def count_flops(self, sizes: Sizes) -> Array:
        """What kernels compute [FLOP]."""
        return sizes["flops"]


@dataclass(frozen=True, eq=False, repr=False)
class TiledRoofline(Roofline):
    """A `Roofline` of products that are computed in whole tiles: small batched products waste most
    of a tile.

    Parameters
    ----------
    tile_m, tile_n : Parameter
        Rows and columns of a tile [-].
    """

    form: ClassVar[str] = "tiled"
    equation: ClassVar[str] = "as roofline, with the flops of whole tiles"

    tile_m: Parameter
    tile_n: Parameter

    @staticmethod
    def evaluate(sizes: Sizes, **parameters: Values) -> Array:
        """Times of kernels [s] for parameters by name, which may be arrays."""
        shares = {
            name: value for name, value in parameters.items() if name not in ("tile_m", "tile_n")
        }
        flops = _fill_tiles(sizes, parameters["tile_m"], parameters["tile_n"])
        return Roofline.evaluate({**sizes, "flops": flops}, **shares)

    def count_flops(self, sizes: Sizes) -> Array:
        """What kernels compute in whole tiles [FLOP]."""
        return _fill_tiles(sizes, self["tile_m"], self["tile_n"])


def _fill_tiles(sizes: Sizes, tile_m: Values, tile_n: Values) -> Array:
    """Operations of products in whole tiles [FLOP]."""
    whole = round_up(sizes["m"], tile_m) * round_up(sizes["n"], tile_n)
    return np.asarray(whole / np.maximum(sizes["m"] * sizes["n"], 1.0) * sizes["flops"])


@dataclass(frozen=True, eq=False, repr=False)
class AttentionRoofline(Roofline):
    """A `Roofline` of fused attention: heads are padded to whole tiles, the softmax takes as long as
    some columns of the products, and tiles on the diagonal of a causal mask are computed whole.

    Parameters
    ----------
    head_multiple : Parameter
        Multiple to which the width of a head is padded, above 128 at least 64 [-].
    softmax_width : Parameter
        Columns of the products that take as long as the softmax of a score [-].
    diagonal : Parameter
        Keys of a tile that a causal mask crosses; 0 without a mask [-].
    """

    form: ClassVar[str] = "attention"
    equation: ClassVar[str] = (
        "as roofline, with flops x (padded width + softmax width) / width x (1 + diagonal / keys)"
    )

    head_multiple: Parameter
    softmax_width: Parameter
    diagonal: Parameter

    @staticmethod
    def evaluate(sizes: Sizes, **parameters: Values) -> Array:
        """Times of kernels [s] for parameters by name, which may be arrays."""
        of_tiles = {name: parameters[name] for name in _OF_ATTENTION}
        of_roofline = {
            name: value for name, value in parameters.items() if name not in _OF_ATTENTION
        }
        flops = _fill_heads(sizes, **of_tiles)
        return Roofline.evaluate({**sizes, "flops": flops}, **of_roofline)

    def count_flops(self, sizes: Sizes) -> Array:
        """What kernels compute in whole tiles and for the softmax [FLOP]."""
        return _fill_heads(sizes, **{name: self[name] for name in _OF_ATTENTION})


#: Parameters that say what kernels of attention compute beside the products.
_OF_ATTENTION = ("head_multiple", "softmax_width", "diagonal")
#: Width of heads, and tokens, of kernels whose sizes are not given [-].
_USUAL_WIDTH, _USUAL_KEYS = 128.0, 4096.0


def _fill_heads(sizes: Sizes, **parameters: Values) -> Array:
    """Operations of attention in whole tiles, with the softmax [FLOP]."""
    width = np.asarray(sizes.get("k", _USUAL_WIDTH))
    keys = np.asarray(sizes.get("n", _USUAL_KEYS))
    tiles: dict[str, Any] = parameters
    work = attention_work(sizes["flops"], np.maximum(width, 1.0), np.maximum(keys, 1.0), **tiles)
    return np.asarray(work)


@dataclass(frozen=True, eq=False, repr=False)
class RowwiseRoofline(KernelModel):
    """Launch, rows, width of a row and memory traffic, one after another: softmax and norms.

    Parameters
    ----------
    launch : Parameter
        Time of an empty kernel [s].
    memory_efficiency : Parameter
        Share of the memory bandwidth that many rows of middle width reach [-].
    per_row : Parameter
        What a row takes whatever its width, over all rows that run at once [s].
    per_column : Parameter
        What a group of threads takes to pass over one number of its row [s].
    """

    form: ClassVar[str] = "rowwise"
    equation: ClassVar[str] = (
        "t = launch + rows per_row + columns per_column + bytes / (e bandwidth)"
    )

    launch: Parameter
    memory_efficiency: Parameter
    per_row: Parameter
    per_column: Parameter

    @staticmethod
    def evaluate(sizes: Sizes, **parameters: Values) -> Array:
        """Times of kernels [s] for parameters by name, which may be arrays."""
        times: dict[str, Any] = {
            name: parameters[name] for name in ("launch", "per_row", "per_column")
        }
        bandwidth: Any = parameters["memory_efficiency"] * sizes["bandwidth"]
        of_rows = (sizes["rows"], sizes["n"], sizes["nbytes"])
        return np.asarray(rowwise_time(*of_rows, bandwidth=bandwidth, **times))

    def split(self, sizes: Sizes) -> dict[str, Array]:
        """Parts that sum to `time`: the launch, the rows, the width of a row, and the memory traffic
        [s]."""
        return {
            "launch": np.asarray(self["launch"]),
            "rows": sizes["rows"] * self["per_row"],
            "width of a row": sizes["n"] * self["per_column"],
            "memory traffic": sizes["nbytes"] / (self["memory_efficiency"] * sizes["bandwidth"]),
        }


@dataclass(frozen=True, eq=False, repr=False)
class SequentialRoofline(Roofline):
    """A `Roofline`, and before it steps that wait for one another: recurrent layers, whose inputs are
    multiplied at once, and factorizations of matrices.

    Parameters
    ----------
    per_step : Parameter
        What a step takes whatever its size [s].
    per_depth : Parameter
        What an inner number of its product adds, while a tile of rows is computed [s].
    per_weight : Parameter
        What a number of its weights adds [s].
    per_product : Parameter
        What a product of two numbers adds [s].
    weight_bytes : Parameter
        Bytes of a weight that each step reads again; 0 for kernels that keep them [B].
    """

    form: ClassVar[str] = "sequential"
    equation: ClassVar[str] = (
        "as roofline, with the weights of each step, + steps (per_step + k per_depth min(1, m / 64)"
        " + n k per_weight + m n k per_product)"
    )

    per_step: Parameter
    per_depth: Parameter
    per_weight: Parameter
    per_product: Parameter
    weight_bytes: Parameter

    @staticmethod
    def evaluate(sizes: Sizes, **parameters: Values) -> Array:
        """Times of kernels [s] for parameters by name, which may be arrays."""
        of_steps: dict[str, Any] = {name: parameters[name] for name in _OF_STEPS}
        of_roofline = {
            name: value
            for name, value in parameters.items()
            if name not in (*_OF_STEPS, "weight_bytes")
        }
        read_again = _count_weights_of_steps(sizes) * parameters["weight_bytes"]
        at_once = Roofline.evaluate(
            {**sizes, "nbytes": sizes["nbytes"] + read_again}, **of_roofline
        )
        return np.asarray(at_once + _time_steps(sizes, **of_steps))

    def split(self, sizes: Sizes) -> dict[str, Array]:
        """Parts that sum to `time`: the steps, and those of a roofline [s]."""
        of_steps = {name: self[name] for name in _OF_STEPS}
        read_again = _count_weights_of_steps(sizes) * self["weight_bytes"]
        steps = _time_steps(sizes, **of_steps)
        launch = np.asarray(self["launch"])
        arithmetic = sizes["flops"] / (self["compute_efficiency"] * sizes["peak"])
        nbytes = sizes["nbytes"] + read_again
        traffic = nbytes / (self["memory_efficiency"] * sizes["bandwidth"])
        larger = np.maximum(arithmetic, traffic)
        return {
            "launch": launch,
            "steps that wait for one another": steps,
            "arithmetic": np.where(arithmetic > traffic, arithmetic, 0.0),
            "memory traffic": np.where(arithmetic > traffic, 0.0, traffic),
            "what does not overlap": self.time(sizes) - launch - steps - larger,
        }


#: Parameters that say what steps take which wait for one another.
_OF_STEPS = ("per_step", "per_depth", "per_weight", "per_product")


def _time_steps(sizes: Sizes, **parameters: Values) -> Array:
    """What steps take that wait for one another [s]."""
    times: dict[str, Any] = parameters
    return np.asarray(sequential_time(sizes["rows"], sizes["m"], sizes["n"], sizes["k"], **times))


def _count_weights_of_steps(sizes: Sizes) -> Array:
    """Numbers of the second matrix of a product, of all steps [-]."""
    return np.asarray(sizes["rows"] * sizes["n"] * sizes["k"])


@dataclass(frozen=True, eq=False, repr=False)
class LookupRoofline(KernelModel):
    """Launch, and the longer of waiting for rows and of memory traffic, or both: lookups of tables.

    Parameters
    ----------
    launch : Parameter
        Time of a kernel without lookups [s].
    memory_efficiency : Parameter
        Share of the memory bandwidth that rows reach [-].
    per_lookup, per_number : Parameter
        What a lookup takes whatever its width, and each of its numbers, over all that run at once
        [s].
    hit : Parameter
        Time of a row that the last cache has, over that of one from memory [-].
    sharpness : Parameter
        Exponent of the smooth maximum of waiting and traffic; 1 adds them [-].
    """

    form: ClassVar[str] = "lookups"
    equation: ClassVar[str] = (
        "t = launch + ((lookups (per_lookup + width per_number) (1 - (1 - hit) hits))^q"
        " + (bytes / (e bandwidth))^q)^(1/q)"
    )

    launch: Parameter
    memory_efficiency: Parameter
    per_lookup: Parameter
    per_number: Parameter
    hit: Parameter
    sharpness: Parameter

    @staticmethod
    def evaluate(sizes: Sizes, **parameters: Values) -> Array:
        """Times of kernels [s] for parameters by name, which may be arrays."""
        given: dict[str, Any] = dict(parameters)
        bandwidth: Any = given.pop("memory_efficiency") * sizes["bandwidth"]
        dim = np.maximum(sizes["dim"], 1.0)
        # an update of sorted lookups has rows, each of them a lookup
        lookups = np.where(sizes["lookups"] > 0, sizes["lookups"], sizes["rows"])
        return np.asarray(
            lookup_time(
                lookups, dim, sizes["nbytes"], bandwidth=bandwidth, hits=sizes["hits"], **given
            )
        )

    def split(self, sizes: Sizes) -> dict[str, Array]:
        """Parts that sum to `time`: the launch, the memory traffic, and what waiting for rows adds
        to it [s]."""
        launch = np.asarray(self["launch"])
        traffic = sizes["nbytes"] / (self["memory_efficiency"] * sizes["bandwidth"])
        return {
            "launch": launch,
            "memory traffic": traffic,
            "waiting for rows": self.time(sizes) - launch - traffic,
        }


@dataclass(frozen=True, eq=False, repr=False)
class Additive(KernelModel):
    """A sum of terms, each a size of the operation times a time.

    Parameters
    ----------
    costs : mapping of str to Parameter
        Time of one unit of each term, by names of `perfkit.models.kernels.TERMS` [s].
    """

    form: ClassVar[str] = "additive"
    equation: ClassVar[str] = "t = sum of parameter times term (bytes, rows, operations, ...)"
    optional: ClassVar[tuple[str, ...]] = tuple(TERMS)

    costs: Mapping[str, Parameter]

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Times of the terms by name."""
        return self.costs

    @classmethod
    def list_parameters(cls) -> tuple[str, ...]:
        """Names of all terms."""
        return tuple(TERMS)

    @classmethod
    def _assemble(cls, parameters: Mapping[str, Parameter], about: Mapping[str, Any]) -> Self:
        return cls(dict(parameters), **about)

    @staticmethod
    def evaluate(sizes: Sizes, **parameters: Values) -> Array:
        """Times of kernels [s] for parameters by name, which may be arrays."""
        costs: dict[str, Any] = parameters
        return additive(sizes, **costs)

    def split(self, sizes: Sizes) -> dict[str, Array]:
        """The time of each term [s]."""
        return {name: additive(sizes, **{name: cost}) for name, cost in self.items()}


# Collectives.


class CollectiveModel(Fit):
    """Time of a collective over the size of its message."""

    def time(self, nbytes: Values, operation: str = "", ranks: int = 0) -> Array:
        """Times until the last rank has finished.

        Parameters
        ----------
        nbytes : float or array
            Message sizes in the nccl-tests convention [B].
        operation : str, optional
            Operation, such as ``all_reduce``; only a law over rank counts needs it [-].
        ranks : int, optional
            Ranks taking part; only a law over rank counts needs them [-].

        Returns
        -------
        time : array
            One time per size [s].
        """
        return self.evaluate(nbytes, operation, ranks, **self.values_by_name)

    @staticmethod
    @abstractmethod
    def evaluate(nbytes: Values, operation: str, ranks: int, **parameters: float) -> Array:
        """Times of messages [s] for parameters by name, which need not be those of a fit; see
        `time`."""


@dataclass(frozen=True, eq=False, repr=False)
class Pipelined(CollectiveModel):
    """Start-up and transfer, with a rounded corner between them.

    Parameters
    ----------
    alpha : Parameter
        Time of a vanishing message [s].
    beta : Parameter
        Time per byte of a huge message [s/B].
    sharpness : Parameter, optional
        Exponent of the smooth maximum; the usual one if not given, 1 for the sum of both [-].

    Examples
    --------
    >>> alpha_beta = Pipelined.build({"alpha": 1e-5, "beta": 1e-11, "sharpness": 1.0})
    >>> round(float(alpha_beta.time(1e6)) * 1e6)
    20
    """

    form: ClassVar[str] = "pipelined"
    equation: ClassVar[str] = "t = (alpha^q + (beta n)^q)^(1/q)"
    optional: ClassVar[tuple[str, ...]] = ("sharpness",)

    alpha: Parameter
    beta: Parameter
    sharpness: Parameter | None = None

    @staticmethod
    def evaluate(nbytes: Values, operation: str, ranks: int, **parameters: float) -> Array:
        """Times of messages [s], see `CollectiveModel.evaluate`."""
        return np.asarray(forms.pipelined(nbytes, **parameters))


@dataclass(frozen=True, eq=False, repr=False)
class TwoBranch(CollectiveModel):
    """The faster of two pipelined protocols.

    Parameters
    ----------
    alpha1, beta1 : Parameter
        Start-up [s] and time per byte [s/B] of the protocol for small messages.
    alpha2, beta2 : Parameter
        Start-up [s] and time per byte [s/B] of the protocol for large messages.
    sharpness : Parameter, optional
        Exponent of both smooth maxima; the usual one if not given [-].
    """

    form: ClassVar[str] = "two_branch"
    equation: ClassVar[str] = "t = min over i of (alpha_i^q + (beta_i n)^q)^(1/q)"
    optional: ClassVar[tuple[str, ...]] = ("sharpness",)

    alpha1: Parameter
    beta1: Parameter
    alpha2: Parameter
    beta2: Parameter
    sharpness: Parameter | None = None

    @staticmethod
    def evaluate(nbytes: Values, operation: str, ranks: int, **parameters: float) -> Array:
        """Times of messages [s], see `CollectiveModel.evaluate`."""
        return np.asarray(forms.two_branch(nbytes, **parameters))


@dataclass(frozen=True, eq=False, repr=False)
class OverRanks(CollectiveModel):
    """A law over rank counts.

    Parameters
    ----------
    alpha0, alpha1 : Parameter
        Start-up that does not depend on the ranks, and start-up of each step [s].
    beta0, beta1 : Parameter
        Time per byte that does not depend on the ranks, and per byte that leaves a rank [s/B].
    sharpness : Parameter, optional
        Exponent of the smooth maximum; the usual one if not given [-].
    """

    form: ClassVar[str] = "over_ranks"
    equation: ClassVar[str] = (
        "t = (alpha^q + (beta n)^q)^(1/q), alpha = alpha0 + alpha1 steps, "
        "beta = beta0 + beta1 (p - 1) / p"
    )
    optional: ClassVar[tuple[str, ...]] = ("sharpness",)

    alpha0: Parameter
    alpha1: Parameter
    beta0: Parameter
    beta1: Parameter
    sharpness: Parameter | None = None

    @staticmethod
    def evaluate(nbytes: Values, operation: str, ranks: int, **parameters: float) -> Array:
        """Times of messages [s] of an operation on some ranks, see `CollectiveModel.evaluate`."""
        return np.asarray(forms.over_ranks(nbytes, ranks, operation, **parameters))


# What real iterations add.


class ContextModel(Fit):
    """What real iterations add to isolated kernels and collectives."""


@dataclass(frozen=True, eq=False, repr=False)
class InContext(ContextModel):
    """Kernels inside an iteration, see `perfkit.models.kernels.in_context`.

    Parameters
    ----------
    scale, cold_scale : Parameter, optional
        Factors on the isolated time, and on what distant operands add [-].
    launch : Parameter, optional
        Extra time of a call [s].
    page_walks : Parameter, optional
        Time of one page walk [s].
    """

    form: ClassVar[str] = "in_context"
    optional: ClassVar[tuple[str, ...]] = ("scale", "cold_scale", "launch", "page_walks")

    scale: Parameter | None = None
    cold_scale: Parameter | None = None
    launch: Parameter | None = None
    page_walks: Parameter | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Iteration(ContextModel):
    """Whole iterations of a family.

    Parameters
    ----------
    scale : Parameter
        Factor on all operations [-].
    per_operation, per_collective, per_resume : Parameter, optional
        Host time of an operation, extra time of a collective, and of the kernels after it [s].
    sharpness : Parameter, optional
        Exponent that joins host and device [-].
    """

    form: ClassVar[str] = "iteration"
    optional: ClassVar[tuple[str, ...]] = (
        "per_operation",
        "per_collective",
        "per_resume",
        "sharpness",
    )

    scale: Parameter
    per_operation: Parameter | None = None
    per_collective: Parameter | None = None
    per_resume: Parameter | None = None
    sharpness: Parameter | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Pace(ContextModel):
    """The usual pace of a machine, see `perfkit.models.kernels.at_usual_pace`.

    Parameters
    ----------
    product, stream, gather : Parameter
        Usual time of each reference work [s].
    product_weight, stream_weight, gather_weight : Parameter
        How much the class depends on it [-].
    """

    form: ClassVar[str] = "pace"

    product: Parameter
    stream: Parameter
    gather: Parameter
    product_weight: Parameter
    stream_weight: Parameter
    gather_weight: Parameter


@dataclass(frozen=True, eq=False, repr=False)
class Overlap(ContextModel):
    """Collectives beside kernels.

    Parameters
    ----------
    contention : Parameter
        Share of its time that a running collective takes from kernels on the same core [-].
    """

    form: ClassVar[str] = "overlap"

    contention: Parameter


@dataclass(frozen=True, eq=False, repr=False)
class Caches(ContextModel):
    """Effective caches.

    Parameters
    ----------
    l2, l3 : Parameter
        Capacities of the last two caches [B].
    pages : Parameter, optional
        Pages that the translation buffer holds [-].
    l3_share : Parameter, optional
        Share of the last cache that is free for a rank [-].
    """

    form: ClassVar[str] = "caches"
    optional: ClassVar[tuple[str, ...]] = ("pages", "l3_share")

    l2: Parameter
    l3: Parameter
    pages: Parameter | None = None
    l3_share: Parameter | None = None


#: Models of kernels, of collectives and of iterations, by the name of their form.
KERNELS: Mapping[str, type[KernelModel]] = {
    model.form: model
    for model in (
        Roofline,
        TiledRoofline,
        AttentionRoofline,
        RowwiseRoofline,
        SequentialRoofline,
        LookupRoofline,
        Additive,
    )
}
COLLECTIVES: Mapping[str, type[CollectiveModel]] = {
    model.form: model for model in (Pipelined, TwoBranch, OverRanks)
}
CONTEXT: Mapping[str, type[ContextModel]] = {
    model.form: model for model in (InContext, Iteration, Pace, Overlap, Caches)
}
