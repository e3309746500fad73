"""Device-hours, energy and cost. Pure functions; does not import torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lockstep.errors import ConfigurationError

_PRICE = re.compile(r"(\d+\.?\d*|\.\d+)\s*(.*)", re.ASCII)


@dataclass(frozen=True)
class Price:
    """The price of one device for an hour; the currency is any word of the user, or empty."""

    amount: float
    currency: str

    @classmethod
    def read(cls, text: str | None) -> Price | None:
        """Return the price in a text such as ``2.50`` or ``2.50 EUR``; None without a text.

        Raises:
            ConfigurationError: It does not begin with a number of at least 0.
        """
        if text is None:
            return None
        if (match := _PRICE.fullmatch(text.strip())) is None:
            advice = 'Give the price of one device for an hour, with or without a currency, such as 2.50 or "2.50 EUR".'
            raise ConfigurationError(f"{text!r} is not a price.\n{advice}")
        return cls(float(match[1]), match[2])


@dataclass(frozen=True)
class Usage:
    """The use of devices.

    Attributes:
        device_s: Seconds, summed over the devices; a CPU rank is a device.
        energy_j: Joules by the counters of these devices; NaN if one of them could not be read.
    """

    device_s: float = 0.0
    energy_j: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.device_s + other.device_s, self.energy_j + other.energy_j)

    def __mul__(self, times: float) -> Usage:
        return Usage(self.device_s * times, self.energy_j * times)

    def text(self, price: Price | None) -> str:
        """Return a text such as ``1.5 device-hours at 2.50 EUR: 3.75 EUR, energy 410 Wh (whole devices)``."""
        hours = self.device_s / 3600
        text = f"{_three_digits(hours)} device-hours"
        if price is not None:
            money, word = price.amount * hours, f" {price.currency}".rstrip()
            text += f" at {price.amount:.2f}{word}: {money:{',.2f' if money >= 1 else '.2g'}}{word}"
        return text + format_energy(self.energy_j)


def format_energy(joules: float, sign: str = "") -> str:
    """Return ``, energy 410 Wh (whole devices)``, as counters include other processes; nothing for NaN: unknown."""
    return "" if math.isnan(joules) else f", energy {_three_digits(joules / 3600, sign)} Wh (whole devices)"


def _three_digits(value: float, sign: str = "") -> str:
    return f"{value:{sign}{',.0f' if abs(value) >= 100 else '.3g'}}"


def more_than_alone(hours: float, num_devices: int, num_alone: int, price: Price | None) -> str:
    """Return the time that more devices save, and their cost, such as ``-0.45 h, +0.25 EUR``.

    Args:
        hours: Their time for the samples that ``num_alone`` devices process in an hour.
        num_devices: The number of devices.
        num_alone: The number of devices of the comparison.
        price: Of a device for an hour; without it, the cost is in device-hours.
    """
    price = price or Price(1.0, "device-hours")
    return f"{hours - 1:+.2f} h, {price.amount * (num_devices * hours - num_alone):+.2f} {price.currency}".rstrip()
