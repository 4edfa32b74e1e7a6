"""Work and time of dense kernels: FLOP and bytes of each operation, and the roofline that turns them into seconds."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from perfkit.units import Values, check_choice

__all__ = [
    "OPTIMIZER_TRAFFIC",
    "TRAFFIC",
    "attention_backward_flops",
    "attention_bytes",
    "attention_flops",
    "elementwise_bytes",
    "gemm_bytes",
    "gemm_flops",
    "optimizer_bytes",
    "roofline_time",
    "round_up",
    "smooth_maximum",
]

_TINY = float(np.finfo(float).tiny)

#: Compulsory traffic per fp32 element [B]: 4 for each tensor read or written; a dropout mask is 1, a cast writes bf16.
TRAFFIC: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("relu", "gelu", "tanh", "sigmoid", "copy", "concat", "transpose", "scale"), 8.0),
        **dict.fromkeys(("relu_backward", "gelu_backward", "tanh_backward", "sigmoid_backward", "add", "mul"), 12.0),
        "mul_backward": 24.0,
        "cast": 6.0,
        "sum": 4.0,
        "fill": 4.0,
        "bce": 12.0,
        "bce_backward": 12.0,
        "softmax": 8.0,
        "softmax_backward": 12.0,
        "dropout": 9.0,
        "dropout_backward": 9.0,
        "dropout_unfused": 24.0,
        "layer_norm": 8.0,
        "layer_norm_backward": 20.0,
    }
)

#: Traffic of one optimizer step per fp32 parameter [B]; "adam" and "adamw" are the eager and foreach forms.
OPTIMIZER_TRAFFIC: Mapping[str, float] = MappingProxyType(
    {
        "sgd": 12.0,
        **dict.fromkeys(("sgd_momentum", "adagrad"), 20.0),
        **dict.fromkeys(("adam_fused", "adamw_fused"), 28.0),
        **dict.fromkeys(("adam", "adamw"), 80.0),  # eager and foreach make eight passes
    }
)


def smooth_maximum(*terms: Values, sharpness: float) -> Values:
    r"""Maximum with a rounded corner: the q-norm.

    Parameters
    ----------
    *terms : floats, arrays or expressions
        Times or other sizes of one unit, none negative [-].
    sharpness : float
        Exponent q: 1 adds the terms, infinity takes the largest, below 1 charges more than the sum [-].

    Returns
    -------
    value : same kind as `terms`
        At least the largest term where `sharpness` is finite; zero where all terms are [-].

    Notes
    -----
    .. math:: \left(\sum_i x_i^q\right)^{1/q}

    The largest term is factored out, so that no power over- or underflows; terms are zero or above 1e-290.

    Examples
    --------
    >>> [round(float(smooth_maximum(3.0, 4.0, sharpness=q)), 2) for q in (1, 2, 50)]
    [7.0, 5.0, 4.0]
    """
    largest = terms[0]
    for term in terms[1:]:
        largest = np.maximum(largest, term)
    if sharpness == np.inf:
        return largest
    # Adding the smallest normal number leaves numbers above 1e-290 as they are, and makes 0 / 0 a zero.
    return largest * sum((term / (largest + _TINY)) ** sharpness for term in terms) ** (1 / sharpness)


def roofline_time(
    flops: Values, nbytes: Values, *, peak: float, bandwidth: float, launch: float = 0.0, sharpness: float = 2.0
) -> Values:
    r"""Time of a kernel that computes while it moves data.

    Parameters
    ----------
    flops : float, array or expression
        Floating-point operations, a multiply-add counts two [FLOP].
    nbytes : float, array or expression
        Bytes moved [B].
    peak : float
        Arithmetic rate reached, the efficiency included [FLOP/s].
    bandwidth : float
        Memory bandwidth reached, the efficiency included [B/s].
    launch : float, optional
        Time of an empty kernel [s].
    sharpness : float, optional
        How completely arithmetic and transfer overlap: 1 adds them, infinity hides the shorter one [-].

    Returns
    -------
    time : same kind as `flops`
        Time of the kernel [s].

    Notes
    -----
    .. math:: t = t_0 + \left((F/P)^q + (n/W)^q\right)^{1/q}

    On bf16 GEMMs with every dimension of at least 512, four fitted parameters leave 4.3 to 6.5 % geometric-mean error
    on held-out shapes (A100 to H200), with q between 1.3 and 2.6; the datasheet roofline without a fit leaves 29 to
    43 %.

    References
    ----------
    .. [1] S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
       architectures", Communications of the ACM 52(4), 2009. doi:10.1145/1498765.1498785

    Examples
    --------
    A 4096 x 4096 x 1024 GEMM in bf16 on an H100 that reaches 700 TFLOP/s and 2.6 TB/s:

    >>> flops, nbytes = gemm_flops(4096, 4096, 1024), gemm_bytes(4096, 4096, 1024, itemsize=2)
    >>> round(float(roofline_time(flops, nbytes, peak=700e12, bandwidth=2.6e12, launch=3e-6)) * 1e6)
    56
    """
    return launch + smooth_maximum(flops / peak, nbytes / bandwidth, sharpness=sharpness)


def round_up(x: Values, multiple: float) -> Values:
    """Round up to what the hardware moves or computes at once: a cache line, a sector, a tile.

    Parameters
    ----------
    x : float, array or expression
        Size [-].
    multiple : float
        Granularity in the same unit [-].

    Returns
    -------
    size : same kind as `x`
        Smallest multiple that holds `x` [-].

    Examples
    --------
    >>> round_up(100, 32)
    128
    """
    return -(-x // multiple) * multiple


def gemm_flops(m: Values, n: Values, k: Values, *, batch: Values = 1) -> Values:
    """Arithmetic of ``y[m, n] = x[m, k] @ w[k, n]``.

    Parameters
    ----------
    m, n, k : int, array or expression
        Rows, columns and reduction length [-].
    batch : int, array or expression, optional
        Independent products [-].

    Returns
    -------
    flops : same kind as the sizes
        Floating-point operations [FLOP].

    Notes
    -----
    2 m n k. The two products of the backward pass, (m, k, n) for the input and (k, n, m) for the weight, take as many
    each.

    Examples
    --------
    >>> gemm_flops(4096, 4096, 1024)
    34359738368.0
    """
    return 2.0 * batch * m * n * k


def gemm_bytes(m: Values, n: Values, k: Values, *, batch: Values = 1, itemsize: float = 4) -> Values:
    """Compulsory traffic of ``y[m, n] = x[m, k] @ w[k, n]``: each matrix once.

    Parameters
    ----------
    m, n, k : int, array or expression
        Rows, columns and reduction length [-].
    batch : int, array or expression, optional
        Independent products [-].
    itemsize : float, optional
        Bytes of one number [B].

    Returns
    -------
    nbytes : same kind as the sizes
        Bytes moved [B].

    Examples
    --------
    >>> gemm_bytes(4096, 4096, 1024, itemsize=2)
    50331648.0
    """
    return 1.0 * itemsize * batch * (1.0 * m * k + 1.0 * k * n + 1.0 * m * n)


def attention_flops(
    batch: Values, heads: Values, sequence: Values, head_dim: Values, *, causal: bool = False
) -> Values:
    """Arithmetic of the two products of attention, forward.

    Parameters
    ----------
    batch, heads, sequence, head_dim : int, array or expression
        Sequences, heads, tokens of a sequence, and width of one head [-].
    causal : bool, optional
        Whether the masked half of the scores is skipped; eager attention computes it all the same [-].

    Returns
    -------
    flops : same kind as the sizes
        Floating-point operations [FLOP].

    Notes
    -----
    4 b a s^2 d, half of it where tiles above the diagonal are skipped.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023,
       arXiv:2307.08691, section 4.1

    Examples
    --------
    >>> attention_flops(8, 16, 512, 64)
    8589934592.0
    """
    return (2.0 if causal else 4.0) * batch * heads * sequence * sequence * head_dim


def attention_backward_flops(
    batch: Values, heads: Values, sequence: Values, head_dim: Values, *, causal: bool = False, fused: bool = True
) -> Values:
    """Arithmetic of the products of attention, backward.

    Parameters
    ----------
    batch, heads, sequence, head_dim : int, array or expression
        Sequences, heads, tokens of a sequence, and width of one head [-].
    causal : bool, optional
        Whether the masked half of the scores is skipped [-].
    fused : bool, optional
        Whether the scores were not kept, and are computed again [-].

    Returns
    -------
    flops : same kind as the sizes
        2.5 times the forward where fused (five products for two), otherwise twice [FLOP].

    References
    ----------
    .. [1] T. Dao, arXiv:2307.08691, section 4.1

    Examples
    --------
    >>> attention_backward_flops(8, 16, 512, 64) / attention_flops(8, 16, 512, 64)
    2.5
    """
    return (2.5 if fused else 2.0) * attention_flops(batch, heads, sequence, head_dim, causal=causal)


def attention_bytes(
    batch: Values, heads: Values, sequence: Values, head_dim: Values, *, itemsize: float = 4, fused: bool = True
) -> Values:
    """Traffic of attention, forward.

    Parameters
    ----------
    batch, heads, sequence, head_dim : int, array or expression
        Sequences, heads, tokens of a sequence, and width of one head [-].
    itemsize : float, optional
        Bytes of one number [B].
    fused : bool, optional
        Whether scores stay on chip; eager attention writes them, passes them through softmax and reads them [-].

    Returns
    -------
    nbytes : same kind as the sizes
        Bytes moved: Q, K, V and output once, and unless fused the scores four times [B].

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness", 2022,
       arXiv:2205.14135, algorithm 0 (the standard implementation)

    Examples
    --------
    >>> attention_bytes(8, 16, 512, 64, itemsize=2), attention_bytes(8, 16, 512, 64, itemsize=2, fused=False)
    (33554432.0, 301989888.0)
    """
    vectors = 4.0 * itemsize * batch * heads * sequence * head_dim
    return vectors if fused else vectors + 4.0 * itemsize * batch * heads * sequence * sequence


def elementwise_bytes(operation: str, elements: Values, itemsize: float = 4) -> Values:
    """Compulsory traffic of an elementwise or row-wise operation.

    Parameters
    ----------
    operation : str
        A key of `TRAFFIC`, for example ``relu_backward`` [-].
    elements : int, array or expression
        Elements of the output, of the input for ``sum`` [-].
    itemsize : float, optional
        Bytes of one number [B].

    Returns
    -------
    nbytes : same kind as `elements`
        Bytes read and written, each tensor once [B].

    Raises
    ------
    ValueError
        For an unknown operation; the message lists the known ones.

    Notes
    -----
    On a V100, ReLU forward and backward at 2048 x 1024 take 4 and 6 % longer than these bytes at full bandwidth.
    Layer norm backward reads its two inputs for the gradient of the input, and again for those of scale and shift.

    Examples
    --------
    >>> elementwise_bytes("relu_backward", 2048 * 1024)
    25165824.0
    """
    return TRAFFIC[check_choice("operation", operation, TRAFFIC)] * (itemsize / 4) * elements


def optimizer_bytes(optimizer: str, parameters: Values, *, itemsize: float = 4) -> Values:
    """Traffic of one dense optimizer step.

    Parameters
    ----------
    optimizer : str
        A key of `OPTIMIZER_TRAFFIC`; ``adam`` and ``adamw`` are the eager and foreach forms torch runs by default [-].
    parameters : int, array or expression
        Parameters updated [-].
    itemsize : float, optional
        Bytes of one number, the same for weight, gradient and state [B].

    Returns
    -------
    nbytes : same kind as `parameters`
        Bytes read and written [B].

    Raises
    ------
    ValueError
        For an unknown optimizer; the message lists the known ones.

    Notes
    -----
    SGD reads weight and gradient and writes the weight (12 B of fp32); momentum and Adagrad add one state to read and
    write (20 B); fused Adam has two (28 B); eager and foreach Adam make eight passes over their tensors (80 B).

    Examples
    --------
    >>> optimizer_bytes("adamw", 1_000_000) / optimizer_bytes("adamw_fused", 1_000_000)
    2.857
    """
    return OPTIMIZER_TRAFFIC[check_choice("optimizer", optimizer, OPTIMIZER_TRAFFIC)] * (itemsize / 4) * parameters
