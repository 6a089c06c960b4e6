"""So many of so many, and two such shares compared. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

Z_BOTH_SIDES = 1.96  #: 95 %, of both sides


@dataclass(frozen=True, slots=True)
class Share:
    """So many of so many, with Wilson's interval: it is sane for few and for none."""

    hits: int
    of: int

    @property
    def rate(self) -> float:
        return self.hits / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return self.bounds(Z_BOTH_SIDES)

    def bounds(self, z: float) -> tuple[float, float]:
        """Wilson's interval, `z` standard errors to each side."""
        if not self.of:
            return 0.0, 1.0
        n, p = self.of, self.rate
        middle, spread = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max((middle - spread) / (1 + z * z / n), 0.0), min((middle + spread) / (1 + z * z / n), 1.0)


@dataclass(frozen=True, slots=True)
class Lift:
    """The difference of two shares, with Newcombe's interval (his method 10)."""

    treated: Share
    control: Share

    @property
    def difference(self) -> float:
        return self.treated.rate - self.control.rate

    @property
    def interval(self) -> tuple[float, float]:
        (low, high), (control_low, control_high) = self.treated.interval, self.control.interval
        p, q = self.treated.rate, self.control.rate
        return (
            self.difference - sqrt((p - low) ** 2 + (control_high - q) ** 2),
            self.difference + sqrt((high - p) ** 2 + (q - control_low) ** 2),
        )

    @property
    def certain(self) -> bool:
        """Whether chance alone is an unlikely cause: zero lies outside of the interval."""
        low, high = self.interval
        return bool(self.treated.of and self.control.of) and (low > 0 or high < 0)
