"""Work and time of dense kernels: FLOP and bytes of each operation, and the roofline that turns
them into seconds."""

import numpy as np

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Values
from perfkit.models.optimizers import find_optimizer, split_form

_TINY = float(np.finfo(float).tiny)
#: Arithmetic of fused attention, backward over forward: scores that were not kept are computed
#: again, five products for two (Dao 2023, arXiv:2307.08691, section 4.1) [-].
ATTENTION_BACKWARD = 2.5


@closed_form()
def smooth_maximum(*terms: Values, sharpness: float) -> Values:
    r"""Maximum with a rounded corner: the q-norm.

    Parameters
    ----------
    *terms : floats, arrays or expressions
        Times or other sizes of one unit, none negative [-].
    sharpness : float
        Exponent q: 1 adds the terms, infinity takes the largest, below 1 charges more than the sum
        [-].

    Returns
    -------
    value : same kind as `terms`
        At least the largest term where `sharpness` is finite; zero where all terms are [-].

    Notes
    -----
    .. math:: \left(\sum_i x_i^q\right)^{1/q}

    The largest term is factored out, so that no power over- or underflows; terms are zero or above
    1e-290.

    Examples
    --------
    >>> [round(float(smooth_maximum(3.0, 4.0, sharpness=q)), 2) for q in (1, 2, 50)]
    [7.0, 5.0, 4.0]
    """
    largest = terms[0]
    for term in terms[1:]:
        largest = np.maximum(largest, term)
    if np.all(sharpness == np.inf):
        return largest
    if len(terms) == 2:
        return largest * (1.0 + (np.minimum(*terms) / (largest + _TINY)) ** sharpness) ** (
            1 / sharpness
        )
    # Adding the smallest normal number leaves numbers above 1e-290 as they are, and makes 0 / 0 a
    # zero.
    return largest * sum((term / (largest + _TINY)) ** sharpness for term in terms) ** (
        1 / sharpness
    )


@closed_form()
def roofline_time(
    flops: Values,
    nbytes: Values,
    *,
    peak: float,
    bandwidth: float,
    launch: float = 0.0,
    sharpness: float = 2.0,
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
        How completely arithmetic and transfer overlap: 1 adds them, infinity hides the shorter one
        [-].

    Returns
    -------
    time : same kind as `flops`
        Time of the kernel [s].

    Notes
    -----
    .. math:: t = t_0 + \left((F/P)^q + (n/W)^q\right)^{1/q}

    On bf16 GEMMs with every dimension of at least 512, four fitted parameters leave 4.3 to 6.5 %
    geometric-mean error on held-out shapes (A100 to H200), with q between 1.3 and 2.6; the
    datasheet roofline without a fit leaves 29 to 43 %.

    References
    ----------
    .. [1] S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model
       for multicore architectures", Communications of the ACM 52(4), 2009.
       doi:10.1145/1498765.1498785

    Examples
    --------
    A 4096 x 4096 x 1024 GEMM in bf16 on an H100 that reaches 700 TFLOP/s and 2.6 TB/s:

    >>> flops, nbytes = gemm_flops(4096, 4096, 1024), gemm_bytes(4096, 4096, 1024, itemsize=2)
    >>> round(float(roofline_time(flops, nbytes, peak=700e12, bandwidth=2.6e12, launch=3e-6)) * 1e6)
    56
    """
    return launch + smooth_maximum(flops / peak, nbytes / bandwidth, sharpness=sharpness)


@closed_form()
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
    # of floats a quotient is rounded up much sooner than a whole division is done
    return (
        np.ceil(x / multiple) * multiple
        if isinstance(x, np.ndarray)
        else -(-x // multiple) * multiple
    )


@closed_form()
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
    2 m n k. The two products of the backward pass, (m, k, n) for the input and (k, n, m) for the
    weight, take as many each.

    Examples
    --------
    >>> gemm_flops(4096, 4096, 1024)
    34359738368.0
    """
    return 2.0 * batch * m * n * k


@closed_form()
def gemm_bytes(
    m: Values, n: Values, k: Values, *, batch: Values = 1, itemsize: float = 4
) -> Values:
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


@closed_form()
def attention_flops(
    batch: Values,
    heads: Values,
    sequence: Values,
    head_dim: Values,
    *,
    causal: Values = False,
    keys: Values | None = None,
    value_dim: Values | None = None,
    backward: bool = False,
) -> Values:
    """Arithmetic of attention: two products forward, five in a fused backward pass.

    Parameters
    ----------
    batch, heads, sequence, head_dim : int, array or expression
        Sequences, heads, tokens of a sequence, and width of one head [-].
    causal : bool, array or expression, optional
        Whether the masked half of the scores is skipped; eager attention computes it all the same
        [-].
    keys : int, array or expression, optional
        Tokens of keys and values; by default as many as `sequence`, which is then the tokens of the
        queries alone: ranks that share a sequence have a part of its queries [-].
    value_dim : int, array or expression, optional
        Width of a head of values; by default `head_dim` [-].
    backward : bool, optional
        Whether it is that of the backward pass.

    Returns
    -------
    flops : same kind as the sizes
        Floating-point operations [FLOP].

    Notes
    -----
    2 b a s^2 (d + v) with values of width v, half of it where tiles above the diagonal are skipped.
    Backward, scores that were not kept are computed again: 2 b a s^2 (3 d + 2 v), as scores and the
    gradients of queries and keys are products over d, those of values and of probabilities over v.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: faster attention with better parallelism and work
       partitioning", 2023, arXiv:2307.08691, section 4.1

    Examples
    --------
    >>> attention_flops(8, 16, 512, 64)
    8589934592.0
    """
    if keys is None:
        keys = sequence
    if value_dim is None:
        forward = 4.0 * (1.0 - 0.5 * causal) * batch * heads * sequence * keys * head_dim
        return ATTENTION_BACKWARD * forward if backward else forward
    of_one_column = 2.0 * (1.0 - 0.5 * causal) * batch * heads * sequence * keys
    if backward:
        return of_one_column * (3.0 * head_dim + 2.0 * value_dim)
    return of_one_column * (head_dim + value_dim)


@closed_form()
def attended_keys(keys: Values, window: Values) -> Values:
    """Keys that a query attends to on average, if each sees itself and those before it in a window.

    Parameters
    ----------
    keys : int, array or expression
        Tokens of the sequence [-].
    window : int, array or expression
        Keys that a query attends to at most [-].

    Returns
    -------
    attended : same kind as the sizes
        Keys [-].

    Notes
    -----
    w - w^2 / (2 s) of s keys, with w the window, at most s: half of s without a window, as
    `attention_flops` counts it. Counted one by one, with the diagonal, it is half a key more.

    References
    ----------
    .. [1] A. Q. Jiang et al., "Mistral 7B", 2023, arXiv:2310.06825, section 2: of 16,384 tokens with a
       window of 4,096 attention is twice as fast; here its arithmetic is 2.29 times less

    Examples
    --------
    >>> float(attended_keys(16384, 4096))
    3584.0
    >>> round(float(8192 / attended_keys(16384, 4096)), 2)
    2.29
    """
    seen = np.minimum(window, keys)
    return seen - seen * seen / (2.0 * keys)


@closed_form()
def attention_work(
    flops: Values,
    width: Values,
    keys: Values,
    *,
    head_multiple: float = 32.0,
    softmax_width: float = 0.0,
    diagonal: float = 0.0,
) -> Values:
    r"""Arithmetic that a fused kernel of attention does, in whole tiles and with its softmax.

    Parameters
    ----------
    flops : float, array or expression
        Arithmetic of the products as `attention_flops` counts it [FLOP].
    width : float, array or expression
        Width of one head [-].
    keys : float, array or expression
        Tokens of keys and values [-].
    head_multiple : float, optional
        Kernels are compiled for heads whose width is a multiple of this, above 128 of 64 at least;
        others are padded on chip [-].
    softmax_width : float, optional
        What the exponential and the other steps of the softmax of one score take, as that many
        columns of the two products [-].
    diagonal : float, optional
        Keys of a tile that a causal mask crosses: its masked half is computed; 0 without a mask
        [-].

    Returns
    -------
    flops : same kind as the sizes
        Arithmetic that takes the time of products [FLOP].

    Notes
    -----
    .. math:: F \frac{\lceil d \rceil + d_s}{d} \left(1 + \frac{c}{k}\right)

    where d is the width, :math:`d_s` the `softmax_width`, c the `diagonal` and k the `keys`. Checked
    on an H200 for heads of 64 to 256 and 512 to 32,768 tokens (`python -m benchmarks.gpu_attention`).

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: faster attention with better parallelism and work
       partitioning", 2023, arXiv:2307.08691; its kernels are compiled for heads of 32, 64, 96, 128,
       192 and 256
    .. [2] J. Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and
       low-precision", 2024, arXiv:2407.08608, section 3: exponentials are computed far more slowly
       than products

    Examples
    --------
    Heads of 150 are computed as heads of 192:

    >>> float(attention_work(100.0, 150, 2048, head_multiple=32))
    128.0
    """
    narrow = round_up(width, head_multiple)
    wide = round_up(width, max(head_multiple, 64.0))
    padded: Values = np.where(width > 128, np.maximum(narrow, wide), narrow)
    return flops * ((padded + softmax_width) / width) * (1.0 + diagonal / keys)


@closed_form()
def rowwise_time(
    rows: Values,
    columns: Values,
    nbytes: Values,
    *,
    bandwidth: float,
    launch: float = 0.0,
    per_row: float = 0.0,
    per_column: float = 0.0,
) -> Values:
    r"""Time of a kernel in which groups of threads each handle one row: a softmax, a norm.

    Parameters
    ----------
    rows, columns : float, array or expression
        Rows, and numbers in a row [-].
    nbytes : float, array or expression
        Bytes moved [B].
    bandwidth : float
        Memory bandwidth reached, the efficiency included [B/s].
    launch : float, optional
        Time of an empty kernel [s].
    per_row : float, optional
        What a row takes whatever its width, over all rows that run at once [s].
    per_column : float, optional
        What a group of threads takes to pass over one number of its row: with few wide rows, most
        of the device waits [s].

    Returns
    -------
    time : same kind as `rows`
        Time of the kernel [s].

    Notes
    -----
    .. math:: t = t_0 + r t_r + c t_c + n / W

    On an H200 every other width of 19 from 64 to 128,256 was fitted; the others err by 12 % in mean
    over 16 kernels, 27 % with launch and bandwidth alone (docs/formulas.md, table 2.5).

    Examples
    --------
    The same numbers in narrow and in wide rows, at 3 TB/s:

    >>> form = {"bandwidth": 3e12, "launch": 2e-6, "per_row": 1e-9, "per_column": 1.6e-9}
    >>> for rows in (2**19, 2**13):
    ...     print(round(float(rowwise_time(rows, 2**25 // rows, 2**27, **form)) * 1e6))
    571
    61
    """
    return launch + rows * per_row + columns * per_column + nbytes / bandwidth


@closed_form()
def sequential_time(
    steps: Values,
    m: Values,
    n: Values,
    k: Values,
    *,
    per_step: float = 0.0,
    per_depth: float = 0.0,
    per_weight: float = 0.0,
    per_product: float = 0.0,
) -> Values:
    r"""Time of steps that wait for one another, each of a small product of matrices: a recurrent
    layer, a factorization.

    Parameters
    ----------
    steps : float, array or expression
        Steps [-].
    m, n, k : float, array or expression
        Rows, columns and inner size of the product of a step [-].
    per_step : float, optional
        What a step takes whatever its size [s].
    per_depth : float, optional
        What an inner number adds, while a tile of 64 rows is computed [s].
    per_weight : float, optional
        What a number of the second matrix adds [s].
    per_product : float, optional
        What a product of two numbers adds [s].

    Returns
    -------
    time : same kind as `steps`
        Time of all steps [s].

    Notes
    -----
    .. math:: t = s \left(t_s + t_k k \min(1, m / 64) + t_w n k + t_p m n k\right)

    Too few products for a device take as long as one tile: the inner size, not the arithmetic, sets
    the time. Constants and what they were judged on: docs/formulas.md, table 2.7.

    Examples
    --------
    1,000 steps of an LSTM of 512, with 64 samples:

    >>> form = {"per_step": 6.2e-6, "per_depth": 36e-9}
    >>> round(float(sequential_time(1000, 64, 2048, 512, **form)) * 1e3, 1)
    24.6
    """
    tile = np.minimum(m / 64.0, 1.0)
    weights = n * k
    return steps * (
        per_step + per_depth * k * tile + per_weight * weights + per_product * m * weights
    )


@closed_form()
def attention_bytes(
    batch: Values,
    heads: Values,
    sequence: Values,
    head_dim: Values,
    *,
    kv_heads: Values,
    itemsize: float = 4,
) -> Values:
    """Compulsory traffic of fused attention, forward: queries, keys, values and output once.

    Parameters
    ----------
    batch, heads, sequence, head_dim : int, array or expression
        Sequences, heads, tokens of a sequence, and width of one head [-].
    kv_heads : int, array or expression
        Heads of keys and values, fewer than `heads` where queries share them [-].
    itemsize : float, optional
        Bytes of one number [B].

    Returns
    -------
    nbytes : same kind as the sizes
        Bytes moved; scores stay on chip [B].

    Examples
    --------
    >>> attention_bytes(8, 16, 512, 64, kv_heads=16, itemsize=2)
    33554432.0
    """
    return 2.0 * itemsize * batch * sequence * head_dim * (heads + kv_heads)


@closed_form()
def optimizer_bytes(optimizer: str, parameters: Values, *, itemsize: float = 4) -> Values:
    """Traffic of one dense optimizer step.

    Parameters
    ----------
    optimizer : str
        A key of `perfkit.models.optimizers.OPTIMIZERS`: the for-each form, which PyTorch runs by
        default on a GPU. With ``_fused`` behind it, as in ``adamw_fused``, the fused form [-].
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
    SGD reads weight and gradient and writes the weight (12 B of fp32). A fused kernel also reads
    and writes each state once: momentum and Adagrad have one (20 B), Adam has two (28 B). The
    for-each form passes over its tensors in one kernel after another: SGD with momentum in three
    (32 B), Adagrad in five (52 B), Adam in seven (72 B), and AdamW in eight (80 B).

    Examples
    --------
    >>> optimizer_bytes("adamw", 1_000_000) / optimizer_bytes("adamw_fused", 1_000_000)
    2.857
    """
    base, form = split_form(optimizer) if isinstance(optimizer, str) else (optimizer, "for_each")
    return find_optimizer(base, dense=True, by_shape=False).update_bytes(parameters, itemsize, form)
