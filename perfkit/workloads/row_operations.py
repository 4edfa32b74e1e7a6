"""Operations whose time depends on how their numbers lie in rows: indexing of whole rows, functions of tensors
that are broadcast along rows, and the kinds of bags of embeddings."""

from collections.abc import Sequence
from math import prod
from typing import Any

from perfkit.workloads.columns import OperationSizes

#: Modes of `torch.nn.EmbeddingBag` by their numbers in PyTorch; a sum has no name of its own.
_MODES = ("", ".mean", ".max")


def count_row_numbers(tensor: Any, indices: Sequence[Any]) -> int:
    """Count the numbers of a row where whole rows are indexed.

    Parameters
    ----------
    tensor : torch.Tensor
        What is indexed.
    indices : sequence of torch.Tensor or None
        An index for each leading dimension; None keeps the dimension.

    Returns
    -------
    numbers : int
        1 where single numbers are indexed, or where a mask says which [-].
    """
    last = 0
    for place, index in enumerate(indices):
        if index is None:
            continue
        if "bool" in str(index.dtype):
            return 1
        last = place + 1
    return max(prod(tensor.shape[last:]), 1)


def name_indexed(name: str, args: Sequence[Any]) -> str:
    """Name the variant of an operation that indexes a tensor: ``index`` or ``index_put``, with ``.rows`` where
    whole rows are indexed.

    Parameters
    ----------
    name : str
        Name of the operation.
    args : sequence
        Its arguments: the tensor and the indices come first.

    Returns
    -------
    variant : str
        On platforms that never timed rows, the variant without ``.rows`` times them.
    """
    variant = "index_put" if "index_put" in name else name
    has_indices = len(args) > 1 and isinstance(args[1], list | tuple)
    if has_indices and count_row_numbers(args[0], args[1]) > 1:
        return f"{variant}.rows"
    return variant


def size_indexed(args: Sequence[Any], out: Any) -> OperationSizes:
    """Sizes of an operation that indexes a tensor: numbers that are moved, and rows of them.

    Parameters
    ----------
    args : sequence
        Tensor, indices, and values that are written, if some are.
    out : torch.Tensor
        The result.

    Returns
    -------
    sizes : OperationSizes
        ``elements`` and ``rows`` [-].
    """
    values = args[2] if len(args) > 2 and hasattr(args[2], "shape") else out
    elements = values.numel()
    if len(args) > 1 and isinstance(args[1], list | tuple):
        numbers = count_row_numbers(args[0], args[1])
        if numbers > 1:
            # values may be broadcast
            elements = max(elements, _count_indexed(args[0], args[1]) * numbers)
            return OperationSizes(elements=elements, rows=elements // numbers)
    return OperationSizes(elements=elements, rows=values.shape[0] if values.dim() else 1)


def _count_indexed(tensor: Any, indices: Sequence[Any]) -> int:
    """Rows that some indices choose."""
    counts = [index.numel() for index in indices if index is not None]
    kept = [size for size, index in zip(tensor.shape, indices, strict=False) if index is None]
    return max(counts, default=1) * prod(kept)


def reads_few_rows(variant: str, args: Sequence[Any], sizes: OperationSizes) -> bool:
    """Whether an operation reads fewer rows of a tensor than the tensor has, so that its bytes do not count.

    Parameters
    ----------
    variant : str
        Variant of the operation.
    args : sequence
        Its arguments; the tensor comes first.
    sizes : OperationSizes
        Its sizes.

    Returns
    -------
    reads_few : bool
        Only for reads of whole rows. The rows that are read count as its result.
    """
    if variant not in ("index.rows", "gather.rows"):
        return False
    return bool(sizes.elements < args[0].numel())


def name_selected(name: str, args: Sequence[Any]) -> str:
    """Name the variant of an operation that reads rows along a dimension: ``gather.rows`` for ``index_select``
    of rows of several numbers, else ``gather``."""
    return "gather.rows" if name == "index_select" and _has_rows(args) else "gather"


def name_scattered(name: str, args: Sequence[Any]) -> str:
    """Name the variant of an operation that writes rows along a dimension: ``scatter_add.rows`` for
    ``index_add`` and ``index_copy`` of rows of several numbers, else ``scatter_add``."""
    by_rows = name.startswith(("index_add", "index_copy")) and _has_rows(args)
    return "scatter_add.rows" if by_rows else "scatter_add"


def _has_rows(args: Sequence[Any]) -> bool:
    """Whether several numbers lie behind each index; arguments are the tensor, a dimension and an index."""
    return _count_behind(args[0], args[1]) > 1


def _count_behind(tensor: Any, dimension: int) -> int:
    """Numbers that lie behind each place of a dimension [-]."""
    if not tensor.dim():
        return 1
    return prod(tensor.shape[dimension % tensor.dim() + 1 :])


def size_selected(args: Sequence[Any], out: Any) -> OperationSizes:
    """Sizes of an operation that reads or writes rows along a dimension: tensor, dimension, index, and, where it
    writes, the rows."""
    moved = args[3] if len(args) > 3 and hasattr(args[3], "shape") else out
    behind = _count_behind(args[0], args[1])
    elements = moved.numel()
    return OperationSizes(elements=elements, rows=elements // max(behind, 1))


def count_runs(out: Any, args: Sequence[Any]) -> int:
    """Count the runs in which a function of several tensors is computed: the numbers within a run are neighbours
    in each tensor, or one number of it.

    Parameters
    ----------
    out : torch.Tensor
        The result.
    args : sequence
        Its arguments; those that are no tensors do not count.

    Returns
    -------
    runs : int
        0 where no tensor is broadcast: then a single run has all numbers [-].
    """
    shapes = [tuple(arg.shape) for arg in args if hasattr(arg, "shape")]
    if not hasattr(out, "shape") or len(shapes) < 2:
        return 0
    run, pattern = 1, None
    for place in range(1, out.dim() + 1):
        size = out.shape[-place]
        if size == 1:
            continue
        repeats = tuple(len(shape) < place or shape[-place] == 1 for shape in shapes)
        if pattern is not None and repeats != pattern:
            return int(out.numel() // run)
        pattern = repeats
        run *= size
    return 0


def name_bags(name: str, args: Sequence[Any]) -> str:
    """Name the variant of a lookup of bags: that of a sum, or with ``.mean``, ``.max`` or ``.weighted``.

    Arguments are table, indices, offsets, scaling by frequency, mode, whether gradients are sparse, and weights.
    """
    return name + _name_mode(args[4], args[6])


def name_gradient_of_bags(name: str, args: Sequence[Any]) -> str:
    """Name the variant of the gradient of bags: ``sparse`` or ``dense``, and how rows were joined.

    Mode, sparsity and weights are the arguments 8 to 10.
    """
    kind = "sparse" if args[9] else "dense"
    return kind + _name_mode(args[8], args[10])


def _name_mode(mode: int, weights: Any) -> str:
    """How the rows of bags are joined."""
    return ".weighted" if weights is not None else _MODES[mode]
