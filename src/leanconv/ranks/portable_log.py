"""A logarithm that is the same everywhere: libraries differ in its last bit, and plans that tie would fall either way.

Only additions, products and quotients, each rounded as IEEE 754 says; ``report/search.js`` does the same in the same
order, so that a page in a browser chooses the ranks that Python chooses.
"""

from __future__ import annotations

import math

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
# 2 artanh(s) = 2 s (1 + s^2 / 3 + s^4 / 5 + ...); |s| <= 0.172, so that the twelfth term is under 2^-60.
TERMS = tuple(1.0 / (2 * number + 1) for number in range(11, -1, -1))


def log(x: float) -> float:
    """Natural logarithm of a normal number above 0, to a few units in the last place."""
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m, e = 2.0 * m, e - 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = 0.0
    for term in TERMS:
        total = total * z + term
    return e * LN2 + 2.0 * s * total
