"""Where a rising function crosses zero."""

from collections.abc import Callable


def find_root(gap: Callable[[float], float], low: float, high: float, *, precision: float = 1e-12) -> float:
    """Find the zero of a rising function.

    Parameters
    ----------
    gap : callable
        The function, of one number.
    low, high : float
        Ends of the interval to search [-].
    precision : float, optional
        Largest error of the root, relative where the root is above 1 [-].

    Returns
    -------
    root : float
        The zero; `low` if the function is not below zero there, `high` if it is not above zero there [-].

    Notes
    -----
    Chandrupatla's method: inverse quadratic interpolation where three points allow it, else bisection. In plain Python,
    because importing SciPy would delay the first prediction.

    References
    ----------
    .. [1] T. R. Chandrupatla, "A new hybrid quadratic/bisection algorithm for finding the zero of a nonlinear function
       without using derivatives", Advances in Engineering Software 28(3), 1997. doi:10.1016/S0965-9978(96)00051-8

    Examples
    --------
    >>> round(find_root(lambda x: x**2 - 2, 0.0, 2.0), 9)
    1.414213562
    """
    a, b, at_a, at_b, part = low, high, gap(low), gap(high), 0.5
    if at_a >= 0 or at_b <= 0:
        return low if at_a >= 0 else high
    while abs(b - a) > (allowed := precision * max(1.0, abs(a))):
        least = allowed / 2 / abs(b - a)
        x = a + min(max(part, least), 1 - least) * (b - a)
        at_x = gap(x)
        if at_x == 0:
            return x
        kept, other = ((a, at_a), (b, at_b)) if (at_x > 0) == (at_a > 0) else ((b, at_b), (a, at_a))
        (a, at_a), (b, at_b), (c, at_c) = (x, at_x), other, kept
        place, height, part = (a - b) / (c - b), (at_a - at_b) / (at_c - at_b), 0.5
        if height**2 < place and (1 - height) ** 2 < 1 - place:
            part = at_a / (at_b - at_a) * at_c / (at_b - at_c)
            part += (c - a) / (b - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
    return a
