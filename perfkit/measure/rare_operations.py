"""Arguments of the operations of `perfkit.measure.rare_kernels`, by their keys in
`perfkit.measure.operations`."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

#: Operands of a case, and the arguments of a call.
_Operands: TypeAlias = Any
_Arguments: TypeAlias = tuple[Any, ...]

#: Number of an LSTM among the modes of recurrent layers, and of the modes of bags, in PyTorch.
_LSTM = 2
_MODES = {"": 0, ".mean": 1, ".max": 2, ".weighted": 0}


class RareOperation(NamedTuple):
    """How to call an operation: its name in PyTorch, with the overload after a dot, its arguments, and whether
    several calls rotate, each with indices of its own, so that caches do not hold the rows of a large table."""

    name: str
    arguments: Callable[[_Operands], _Arguments]
    rotates: bool = False


# -- rows
# ----------------------------------------------------------------------------------------------------


def _draw_rows(operands: _Operands) -> torch.Tensor:
    rows: torch.Tensor = operands.indices(operands.size("table_rows"), "rows")
    return rows


def _find_table(operands: _Operands) -> torch.Tensor:
    """The table, which all calls that rotate share."""
    if operands.table is None:
        operands.table = operands.rand("table_rows", "dim")
    table: torch.Tensor = operands.table
    return table


def _take_rows(operands: _Operands) -> _Arguments:
    """Table and indices."""
    return _find_table(operands), [_draw_rows(operands)]


def _put_rows(operands: _Operands) -> _Arguments:
    """Table, indices, values, and whether they are added."""
    return _find_table(operands), [_draw_rows(operands)], operands.rand("rows", "dim"), True


def _select_rows(operands: _Operands) -> _Arguments:
    """Table, dimension and index."""
    return _find_table(operands), 0, _draw_rows(operands)


def _add_rows(operands: _Operands) -> _Arguments:
    """Table, dimension, index and values."""
    return *_select_rows(operands), operands.rand("rows", "dim")


def _make_sparse(operands: _Operands) -> torch.Tensor:
    """Rows of a sparse gradient."""
    shape = (operands.size("table_rows"), operands.size("dim"))
    rows, values = _draw_rows(operands)[None], operands.rand("rows", "dim")
    return torch.sparse_coo_tensor(rows, values, size=shape, check_invariants=False)


def _mask_sparse(operands: _Operands) -> _Arguments:
    """Table, and the sparse gradient whose rows are read; its rows are all different ones, but the case
    states how many lookups it has."""
    gradient = _make_sparse(operands)
    # PyTorch takes any sparse tensor that says so
    gradient._coalesced_(True)
    return _find_table(operands), gradient


# -- bags
# ----------------------------------------------------------------------------------------------------


def name_joined(variant: str) -> str:
    """How a variant joins the rows of a bag, such as ``.mean``; empty for a sum."""
    _, dot, joined = variant.partition(".")
    return dot + joined


def list_bag_calls(operands: _Operands, variant: str) -> list[_Arguments]:
    """Arguments of `_embedding_bag` for calls that rotate."""
    joined = name_joined(variant)
    table = operands.rand("table_rows", "dim")
    weights = operands.rand("lookups") if joined == ".weighted" else None
    calls = []
    for call in operands.draw_lookups(len(table)):
        calls.append((table, call.rows, call.offsets, False, _MODES[joined], False, weights))
    return calls


def list_bag_gradients(operands: _Operands, variant: str) -> list[_Arguments]:
    """Arguments of `_embedding_bag_backward` for calls that rotate."""
    joined = name_joined(variant)
    is_sparse = variant.startswith("sparse")
    gradient, rows = operands.rand("bags", "dim"), operands.size("table_rows")
    calls = []
    for table, chosen, offsets, *_, weights in list_bag_calls(operands, variant):
        mode = _MODES[joined]
        bags = torch.ops.aten._embedding_bag(table, chosen, offsets, False, mode, False, weights)
        about_bags = (chosen, offsets, *bags[1:])
        calls.append((gradient, *about_bags, rows, False, mode, is_sparse, weights))
    return calls


# -- recurrent layers
# ----------------------------------------------------------------------------------------------------


def _recur(operands: _Operands) -> _Arguments:
    """Input, weights, biases, states, direction, lengths, mode, width, layers, whether it has biases and two
    directions, whether batches come first, and whether it trains."""
    hidden, steps = operands.size("dim"), operands.size("rows")
    samples, inputs = operands.size("m") // steps, operands.size("k") - hidden
    scale = 0.01
    weights = [
        scale * operands.rand(4 * hidden, inputs),
        scale * operands.rand(4 * hidden, hidden),
        operands.rand(4 * hidden),
        operands.rand(4 * hidden),
    ]
    states = [operands.rand(samples, hidden), operands.rand(samples, hidden)]
    begin = (operands.rand(steps, samples, inputs), *weights, *states)
    return *begin, False, [], _LSTM, hidden, 1, True, False, False, True


def _return_recurrent(operands: _Operands) -> _Arguments:
    """What the forward pass had and gave, gradients of the results, direction, mode, width, layers, whether it
    has biases, trains and has two directions, lengths, whether batches come first, and the workspace."""
    arguments = _recur(operands)
    result, last, cell, workspace = torch.ops.aten.mkldnn_rnn_layer(*arguments)
    gradient = operands.rand(*result.shape)
    before = (*arguments[:7], result, last, cell, gradient, None, None)
    hidden = operands.size("dim")
    return *before, False, _LSTM, hidden, 1, True, True, False, [], False, workspace


# -- spectra and matrices
# ----------------------------------------------------------------------------------------------------


def _transform(operands: _Operands) -> _Arguments:
    """Real fields, dimensions, normalization, and whether half of the waves is enough."""
    dimensions = [1, 2] if operands.size("height") > 1 else [2]
    return operands.rand("rows", "height", "width"), dimensions, 0, True


def _transform_back(operands: _Operands) -> _Arguments:
    """Half of the waves, dimensions, normalization, and the length of the last one."""
    fields, dimensions, _, _ = _transform(operands)
    waves = torch.ops.aten._fft_r2c(fields, dimensions, 0, True)
    return waves, dimensions, 2, operands.size("width")


def _transform_complex(operands: _Operands) -> _Arguments:
    """Complex fields, dimensions, normalization and direction."""
    fields, dimensions, _, _ = _transform(operands)
    return fields.to(torch.complex64), dimensions, 0, True


def _make_positive(operands: _Operands) -> torch.Tensor:
    """A symmetric matrix whose eigenvalues are above 0."""
    side = operands.size("n")
    columns = operands.rand(side, side)
    return columns @ columns.t() + side * torch.eye(side)


def _factorize(operands: _Operands) -> _Arguments:
    return (_make_positive(operands),)


def _solve(operands: _Operands) -> _Arguments:
    """A matrix, and right-hand sides."""
    return _make_positive(operands), operands.rand("n", "n")


#: By class and variant, or by variant.
RARE_OPERATIONS = {
    "index.rows": RareOperation("index.Tensor", _take_rows, rotates=True),
    "index_put.rows": RareOperation("index_put", _put_rows, rotates=True),
    "gather.rows": RareOperation("index_select", _select_rows, rotates=True),
    "scatter_add.rows": RareOperation("index_add", _add_rows, rotates=True),
    "scatter_add.coalesce": RareOperation("_coalesce", lambda operands: (_make_sparse(operands),)),
    "scatter_add.sparse_mask": RareOperation("sparse_mask", _mask_sparse, rotates=True),
    "gemm.recurrent.nt": RareOperation("mkldnn_rnn_layer", _recur),
    "gemm.recurrent_backward.nt": RareOperation("mkldnn_rnn_layer_backward", _return_recurrent),
    "fourier.1_passes": RareOperation("_fft_r2c", _transform),
    "fourier.3_passes": RareOperation("_fft_c2c", _transform_complex),
    "fourier.5_passes": RareOperation("_fft_c2r", _transform_back),
    "factorization.triangular": RareOperation("linalg_solve_triangular", _solve),
    "factorization.solve": RareOperation("_linalg_solve_ex", _solve),
    "factorization.cholesky": RareOperation("linalg_cholesky_ex", _factorize),
    "factorization.lu": RareOperation("linalg_lu_factor_ex", _factorize),
    "factorization.inverse": RareOperation("linalg_inv_ex", _factorize),
    "factorization.qr": RareOperation("linalg_qr", _factorize),
    "factorization.eigh": RareOperation("_linalg_eigh", _factorize),
    "factorization.svd": RareOperation("_linalg_svd", _factorize),
}
#: Arguments with a name.
NAMED_ARGUMENTS = {"factorization.triangular": {"upper": True}}
