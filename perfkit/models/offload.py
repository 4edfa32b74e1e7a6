"""Offload to the memory of the host: names of its operations, and what an update there moves."""

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Values

#: What ranks do with the memory of their host: a copy there, one back, an update of weights, and a copy
#: of the inputs of each rank.
TO_HOST, FROM_HOST, HOST_UPDATE = "copy_to_host", "copy_from_host", "host_update"
COPY_INPUTS = "copy_inputs"
HOST_WORK = (TO_HOST, FROM_HOST, HOST_UPDATE, COPY_INPUTS)
#: Share of the peak bandwidth of the host that an update reaches [-]; docs/formulas.md, table 11.2.
UPDATE_SHARE = 0.48
#: Bytes that one thread of a CPU reads and writes in an update [B/s]; docs/formulas.md, table 11.2.
THREAD_RATE = 1.9e10


@closed_form()
def host_update_bytes(
    weights: Values, *, states: float, wide: float = 4.0, narrow: float = 2.0
) -> Values:
    r"""Bytes that an update of weights moves in the memory of the host.

    Parameters
    ----------
    weights : float or array
        Trained numbers that the host updates [-].
    states : int
        Numbers that the optimizer keeps for each weight: 2 for Adam [-].
    wide, narrow : float, optional
        Bytes of a number that the optimizer keeps, and of a weight that goes back to the device
        [B].

    Returns
    -------
    nbytes : same kind as `weights`
        Gradient, weight and states read, weight and states written, and the copy of the weight in
        the format of the device, if that is a narrower one [B].

    Notes
    -----
    .. math:: P (w (3 + 2 s) + n)

    Its time is that of these bytes at 0.48 of the peak bandwidth of the host. DeepSpeed's CPU Adam
    on the two Xeon Platinum 8168 of a DGX-2 (256 GB/s) takes 0.22, 1.03 and 2.57 s for 1, 4 and 10
    billion weights [1]_: 0.53, 0.46 and 0.46 of it. PyTorch's own takes 5.5 to 6.3 times as long.

    References
    ----------
    .. [1] Ren et al., "ZeRO-Offload", table 4, https://arxiv.org/abs/2101.06840

    Examples
    --------
    >>> round(float(host_update_bytes(10e9, states=2)) / (UPDATE_SHARE * 256e9), 2)
    2.44
    """
    copy = 0.0
    if narrow < wide:
        copy = narrow
    return weights * (wide * (3.0 + 2.0 * states) + copy)
