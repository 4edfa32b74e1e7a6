"""What a rank keeps where ranks share a Transformer: model states and activations."""

import numpy as np

from perfkit.ground.units import Values, check_choice

#: What is computed again in the backward pass: nothing, scores of attention, or whole layers.
RECOMPUTED = ("none", "selective", "full")


def model_state_bytes(
    parameters: Values, *, ranks: Values = 1, zero: Values = 0, weight: float = 2.0, gradient: float = 2.0,
    states: float = 12.0,
) -> Values:  # fmt: skip
    """Memory of weights, gradients and optimizer states.

    Parameters
    ----------
    parameters : float or array
        Trained numbers of the rank before they are shared [-].
    ranks : int or array, optional
        Ranks that share them [-].
    zero : int or array, optional
        Stage: nothing is shared (0), states (1), gradients too (2), weights too (3) [-].
    weight, gradient, states : float, optional
        Bytes of a weight, its gradient, and its states; Adam keeps an fp32 copy and two moments [B].

    Returns
    -------
    nbytes : same kind as `parameters`
        Bytes [B].

    References
    ----------
    .. [1] S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020,
       arXiv:1910.02054, figure 1

    Examples
    --------
    Figure 1: 7.5 billion parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB.

    >>> [round(float(model_state_bytes(7.5e9, ranks=64, zero=stage)) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    parts = [own / np.where(zero >= stage, ranks, 1) for own, stage in ((weight, 3), (gradient, 2), (states, 1))]
    return parameters * sum(parts)


def activation_bytes(
    batch: Values, sequence: Values, hidden: Values, *, heads: Values, kv_share: Values = 1.0, width: Values = 0,
    inner: Values = 0, gated: bool = False, fused: bool = False, dropout: bool = True, tensor: Values = 1,
    sharing: Values = 1, recompute: str = "none", itemsize: float = 2.0,
) -> Values:  # fmt: skip
    """Memory of the activations that a layer keeps for its backward pass.

    Parameters
    ----------
    batch, sequence, hidden : int or array
        Sequences of a micro-batch, tokens of one, and width [-].
    heads : int or array
        Attention heads [-].
    kv_share : float or array, optional
        Heads of keys and values for each head of queries [-].
    width : int or array, optional
        Width of all heads of queries; that of the layer unless given [-].
    inner : int or array, optional
        Width between the products of a layer; four times the width unless given [-].
    gated : bool, optional
        Whether a product gates another one [-].
    fused : bool, optional
        Whether scores of attention never reach memory [-].
    dropout : bool, optional
        Whether a mask of a byte for each number is kept, twice a layer and of the scores [-].
    tensor : int or array, optional
        Ranks that share the products of a layer [-].
    sharing : int or array, optional
        Ranks that share the rest of it, as many where sequence-parallel [-].
    recompute : str, optional
        One of `RECOMPUTED` [-].
    itemsize : float, optional
        Bytes of one number [B].

    Returns
    -------
    nbytes : same kind as `batch`
        Bytes of one layer on one rank [B].

    Notes
    -----
    With dropout, four times the width and scores in memory this is table 2 of [1]_: s b h (34 + 5 a s / h), where
    ranks share products s b h (10 + 24 / t + 5 a s / (h t)), all of it over t with sequence parallelism, without
    5 a s / h where scores are computed again, and 2 s b h where all is.

    References
    ----------
    .. [1] V. Korthikanti et al., "Reducing activation recomputation in large Transformer models", MLSys 2023,
       arXiv:2205.05198, table 2

    Examples
    --------
    >>> activation_bytes(1, 2048, 12288, heads=96) / (2048 * 12288)  # 34 + 5 * 96 * 2048 / 12288
    114.0
    """
    tokens, wide, mask = 1.0 * batch * sequence, 1.0 * (inner or 4 * hidden), 1.0 * dropout
    if check_choice("recompute", recompute, RECOMPUTED) == "full":
        return itemsize * tokens * hidden / sharing
    rest = tokens * hidden * (4 * itemsize + 2 * mask) / sharing
    shared = itemsize * tokens * ((width or hidden) * (2 + 2 * kv_share) + wide * (3 if gated else 2)) / tensor
    scores = 0.0 if fused or recompute == "selective" else heads * sequence * tokens * (itemsize * (1 + mask) + mask)
    return rest + shared + scores / tensor
