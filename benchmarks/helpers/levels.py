"""Levels of software stacks, fitted to published training steps.

After one free factor for each group of steps perfkit is right to a few per cent: what differs is
the level, and it goes with the device, the number format and the software (the *stack*). The level
of a step, the logarithm of its measured over its predicted time, is the sum of independent parts:

    level = device and format + stack + cell + nodes (+ experts) + group + rest

where a cell is a stack on a device in a format, and a group are steps of one source and one model,
often also of one number of ranks or one day. Steps of one group in two cells (of one node and of
several) have a part "group" in each. A source has no part: where one is left out, intervals know
nothing of what its steps have in common. Each part has mean 0 and a variance of its own, which has
the largest likelihood with a wide prior (a model of variance components; S. R. Searle, G. Casella,
C. E. McCulloch, "Variance components", Wiley 1992, chapter 6). A cell then has the mean and the
variance that follow from all steps: a cell with many groups its own level, one with few a level
shrunk to its stack and its device, one without the sum of these two parts with a wide interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from benchmarks.helpers.errors import HALF_WIDTH
from perfkit.ground.units import Array


class Cell(NamedTuple):
    """A stack on a device in a format, whose steps have a common level.

    Parameters
    ----------
    stack : str
        Software, such as ``megatron-te``.
    generation : str
        Generation of the device, such as ``h100``.
    format : str
        ``fp8``, ``bf16`` (also fp16) or ``fp32``.
    has_experts : bool
        Whether the model has experts: their exchanges and products err on their own.
    crosses_nodes : bool
        Whether the ranks fill more than one node: networks and stragglers err on their own.
    """

    stack: str
    generation: str
    format: str
    has_experts: bool = False
    crosses_nodes: bool = False

    @property
    def device(self) -> tuple[str, str]:
        """Generation and format."""
        return self.generation, self.format


class Observation(NamedTuple):
    """A published step beside its prediction without a level.

    Parameters
    ----------
    cell : Cell
        What ran it.
    source : str
        Who published it.
    group : str
        Steps of one source and one model, often also of one number of ranks or one day, which are
        left out together.
    level : float
        Logarithm of measured over predicted time [-].
    seconds : float
        Measured time [s].
    model : str
        Model of a source, whose groups are left out together where models are.
    """

    cell: Cell
    source: str
    group: str
    level: float
    seconds: float = math.nan
    model: str = ""

    @property
    def predicted(self) -> float:
        """Predicted time without a level [s]."""
        return self.seconds * math.exp(-self.level)


class Components(NamedTuple):
    """Standard deviations of the parts of a level [-].

    Parameters
    ----------
    device : float
        Of a device and format.
    stack : float
        Of a stack on all devices.
    cell : float
        Of a stack on one device in one format.
    nodes : float
        Of one node, or of several, in a cell.
    experts : float
        Of models with experts in a cell, beside its level.
    group : float
        Of a group.
    rest : float
        Of single steps.
    """

    device: float
    stack: float
    cell: float
    nodes: float
    experts: float
    group: float
    rest: float


class Level(NamedTuple):
    """What steps of a cell take.

    Parameters
    ----------
    mean : float
        Logarithm of measured over predicted time [-].
    stderr : float
        Standard error of it [-].
    spread : float
        Standard deviation of the level of one step of a new group, with that error [-].
    steps : int
        Published steps of this cell [-].
    groups : int
        Their groups [-].
    sources : str
        Who published them; of another cell, that its level comes from those of others.
    """

    mean: float
    stderr: float
    spread: float
    steps: int
    groups: int
    sources: str


class _Unit(NamedTuple):
    """The steps of a group in a cell.

    Parameters
    ----------
    cell : Cell
        What ran them.
    group : str
        Their group.
    mean : float
        Mean of their levels [-].
    source : str
        Who published them.
    steps : int
        How many there are.
    levels : tuple of float
        All of them [-].
    """

    cell: Cell
    group: str
    mean: float
    source: str
    steps: int
    levels: tuple[float, ...]

    @property
    def squares(self) -> float:
        """Sum of squared distances from the mean [-]."""
        return float(np.sum((np.array(self.levels) - self.mean) ** 2))


#: Where the search for the components starts, and the standard deviation of their logarithms around
#: it: a prior so wide that it counts only where there is hardly any step.
_START = Components(0.10, 0.08, 0.06, 0.06, 0.15, 0.05, 0.04)
_PRIOR = 1.0
#: How many steps those of all cells count as beside the steps of one cell [-].
_WORTH = 8.0
#: Most steps of a group that count: further ones say little about levels [-].
_MOST = 12.0


@dataclass(frozen=True)
class LevelModel:
    """Fitted levels.

    Parameters
    ----------
    units : tuple of _Unit
        What was fitted.
    components : Components
        Standard deviations of the parts.
    factors : mapping of Cell to float
        How many times as far as the model says the steps of a cell lie from what other groups say
        of them [-].
    elsewhere : float
        The same for cells without steps, when each cell is left out in turn [-].
    """

    units: tuple[_Unit, ...]
    components: Components
    factors: Mapping[Cell, float]
    elsewhere: float

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells with steps."""
        return tuple(dict.fromkeys(unit.cell for unit in self.units))

    def find(self, cell: Cell) -> Level:
        """The level of a cell."""
        parts = self.components
        matrix = _covariances(self.units, parts)
        means = np.array([unit.mean for unit in self.units])
        shared = np.array([_share(cell, unit.cell, parts) for unit in self.units])
        solved = np.linalg.solve(matrix, np.column_stack([means, shared]))
        prior = _share(cell, cell, parts)
        variance = max(prior - float(shared @ solved[:, 1]), 0.0)
        around = parts.group**2 + parts.rest**2
        of_cell = [unit for unit in self.units if unit.cell == cell]
        sources = dict.fromkeys(unit.source for unit in of_cell)
        factor = self.factors.get(cell, self.elsewhere)
        return Level(
            mean=float(shared @ solved[:, 0]),
            stderr=math.sqrt(variance),
            spread=factor * math.sqrt(variance + around),
            steps=sum(unit.steps for unit in of_cell),
            groups=len(of_cell),
            sources=", ".join(sources) or "other software, or other steps of it",
        )


def fit_levels(observations: Sequence[Observation]) -> LevelModel:
    """Fit levels to published steps.

    Parameters
    ----------
    observations : sequence of Observation
        Steps; those of one group count as at most twelve.

    Returns
    -------
    model : LevelModel
        Levels of all cells, also of those without steps.
    """
    units = _join_groups(observations)
    components = _find_components(units)
    factors = _find_factors(units, components)
    return LevelModel(units, components, factors, _leave_cells_out(units, components))


def _join_groups(observations: Sequence[Observation]) -> tuple[_Unit, ...]:
    """The steps of each group in each cell."""
    members: dict[tuple[Cell, str], list[Observation]] = {}
    for one in observations:
        members.setdefault((one.cell, one.group), []).append(one)
    units = []
    for (cell, group), ones in members.items():
        levels = np.array([one.level for one in ones])
        mean = float(levels.mean())
        units.append(_Unit(cell, group, mean, ones[0].source, len(ones), tuple(levels.tolist())))
    return tuple(units)


def _share(one: Cell, other: Cell, parts: Components) -> float:
    """Covariance of the levels of two cells."""
    covariance = 0.0
    is_on_one_device = one.device == other.device
    is_of_one_stack = one.stack == other.stack
    if is_on_one_device:
        covariance += parts.device**2
    if is_of_one_stack:
        covariance += parts.stack**2
    if is_on_one_device and is_of_one_stack:
        covariance += parts.cell**2
        if one.crosses_nodes == other.crosses_nodes:
            covariance += parts.nodes**2
        if one.has_experts and other.has_experts:
            covariance += parts.experts**2
    return covariance


def _covariances(units: Sequence[_Unit], parts: Components) -> Array:
    """Covariances of the means of units."""
    cells = list(dict.fromkeys(unit.cell for unit in units))
    between = np.array([[_share(one, other, parts) for other in cells] for one in cells])
    number = [cells.index(unit.cell) for unit in units]
    return np.asarray(between[np.ix_(number, number)] + np.diag(_scatter(units, parts)))


def _scatter(units: Sequence[_Unit], parts: Components) -> Array:
    """Variances of the means of units around the levels of their cells."""
    counts = np.array([min(unit.steps, _MOST) for unit in units])
    return np.asarray(parts.group**2 + parts.rest**2 / counts)


def _find_components(units: Sequence[_Unit]) -> Components:
    """Standard deviations with the largest likelihood: of the means of groups, and of the steps
    around them."""
    means = np.array([unit.mean for unit in units])
    start = np.log(_START)
    freedom = 0.0
    squares = 0.0
    for unit in units:
        weight = min(unit.steps, _MOST) / unit.steps
        freedom += weight * (unit.steps - 1)
        squares += weight * unit.squares

    def penalize(logs: Array) -> float:
        parts = Components(*np.exp(logs))
        factor = cho_factor(_covariances(units, parts), lower=True)
        half_determinant = float(np.log(np.diag(factor[0])).sum())
        misfit = 0.5 * float(means @ cho_solve(factor, means))
        inside = freedom * math.log(parts.rest) + 0.5 * squares / parts.rest**2
        prior = 0.5 * float((((logs - start) / _PRIOR) ** 2).sum())
        return half_determinant + misfit + inside + prior

    found = minimize(penalize, start, method="L-BFGS-B")
    return Components(*(float(value) for value in np.exp(found.x)))


def _find_distances(
    units: Sequence[_Unit], parts: Components, names: Sequence[object]
) -> list[Array]:
    """Distances of the steps of each unit from what all units of other names say of them, in
    standard deviations that the model expects [-]."""
    matrix = _covariances(units, parts)
    means = np.array([unit.mean for unit in units])
    counts = np.array([min(unit.steps, _MOST) for unit in units])
    own = np.diag(matrix) + parts.rest**2 * (1.0 - 1.0 / counts)
    distances: list[Array] = [np.zeros(0) for _ in units]
    for name in dict.fromkeys(names):
        is_left_out = np.array([other == name for other in names])
        kept = ~is_left_out
        shared = matrix[np.ix_(is_left_out, kept)]
        solved = np.linalg.solve(matrix[np.ix_(kept, kept)], shared.T)
        expected = solved.T @ means[kept]
        variances = own[is_left_out] - np.einsum("ij,ji->i", shared, solved)
        for place, middle, variance in zip(
            np.flatnonzero(is_left_out).tolist(), expected, variances, strict=True
        ):
            levels = np.array(units[place].levels)
            distances[place] = np.abs(levels - middle) / math.sqrt(variance)
    return distances


def _scale_intervals(distances: Array, weights: Array) -> float:
    """By what standard deviations are multiplied so that 80 % intervals hold 80 % of steps [-]."""
    order = np.argsort(distances)
    shares = (np.cumsum(weights[order]) - 0.5 * weights[order]) / weights.sum()
    return float(np.interp(0.8, shares, distances[order])) / HALF_WIDTH


def _find_factors(units: Sequence[_Unit], parts: Components) -> dict[Cell, float]:
    """How far the steps of each cell lie from what others say, if each group is left out in turn;
    those of all cells count as so many steps more."""
    distances = _find_distances(units, parts, [unit.group for unit in units])
    of_all = np.concatenate(distances)
    weights_of_all = np.concatenate(
        [np.full(unit.steps, min(unit.steps, _MOST) / unit.steps) for unit in units]
    )
    weights_of_all = _WORTH * weights_of_all / weights_of_all.sum()
    factors = {}
    for cell in dict.fromkeys(unit.cell for unit in units):
        own = np.concatenate(
            [of_unit for unit, of_unit in zip(units, distances, strict=True) if unit.cell == cell]
        )
        together = np.concatenate([own, of_all])
        weights = np.concatenate([np.ones(len(own)), weights_of_all])
        factors[cell] = _scale_intervals(together, weights)
    return factors


def _leave_cells_out(units: Sequence[_Unit], parts: Components) -> float:
    """How far the steps of a cell lie from what other cells say of them."""
    distances = _find_distances(units, parts, [unit.cell for unit in units])
    weights = np.concatenate([np.full(unit.steps, 1.0 / unit.steps) for unit in units])
    return _scale_intervals(np.concatenate(distances), weights)
