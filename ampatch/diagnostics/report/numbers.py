"""The numbers of a report in the units that a person reads: KiB, ms, percent, powers of 2.

Owns these spellings. Must never round a number that is shown as exact.
"""

from __future__ import annotations

import math
from typing import Any

#: Stands for what there is not.
DASH = "\u2013"
TIMES = "\u00d7"
_MINUS = "\u2212"
#: A space at which no browser breaks the line.
_SPACE = "\u202f"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_IN_TERMINAL = str.maketrans({_SPACE: " ", _MINUS: "-", TIMES: "x", DASH: "-", "µ": "u"})
_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = ((60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
#: From here on the digits of a count no longer fit a column.
_LONG = 10_000_000


def real(value: Any) -> float | None:
    """Returns a number of a report as a float; inf and NaN are texts there. None stays None."""
    return None if value is None else float(value)


def exact(value: Any) -> str:
    """Returns a number as Python writes it, so that it can be read back; empty for None."""
    return "" if value is None else str(value)


def digits(value: Any) -> str:
    """Returns a number with three significant digits."""
    number = real(value)
    if number is None:
        return DASH
    if not math.isfinite(number):
        return {math.inf: "inf", -math.inf: f"{_MINUS}inf"}.get(number, "NaN")
    if not number:
        return "0"
    if not 1e-3 <= abs(number) < 1e6:
        mantissa, _, exponent = f"{number:.2e}".partition("e")
        return f"{mantissa}{_SPACE}{TIMES}{_SPACE}10{str(int(exponent)).translate(_SUPERSCRIPTS)}".replace("-", _MINUS)
    text = f"{number:#.3g}" if abs(number) < 100 else f"{number:,.0f}"
    return text.rstrip(".").replace("-", _MINUS).replace(",", _SPACE)


def count(value: Any) -> str:
    """Returns a whole number with its digits in groups of three; a very great one rounded."""
    number = real(value)
    if number is None or not math.isfinite(number) or number % 1:
        return digits(value)
    if abs(number) < _LONG:
        return f"{number:,.0f}".replace("-", _MINUS).replace(",", _SPACE)
    thousands = 2 if abs(number) < 1e9 else 3
    return f"{digits(number / 1000**thousands)}{_SPACE}{'MG'[thousands - 2]}" if abs(number) < 1e12 else digits(number)


def size(number: float) -> str:
    """Returns a number of bytes in bytes, KiB, MiB and so on."""
    if not number:
        return "0"
    step = 0
    while abs(number) >= 1023.5 and step + 1 < len(_BYTES):
        number, step = number / 1024, step + 1
    text = f"{number:.0f}" if step == 0 else digits(number)
    return f"{text}{_SPACE}{_BYTES[step]}".replace("-", _MINUS)


def seconds(number: float) -> str:
    """Returns a time in min, s, ms, µs or ns."""
    unit, name = next((pair for pair in _SECONDS if abs(number) >= 0.9995 * pair[0]), _SECONDS[-1])
    return f"{digits(number / unit)}{_SPACE}{name if number else 's'}"


def size_in_text(number: float) -> str:
    """Returns what `size` does in characters that every terminal shows, and with spaces that may break."""
    return size(number).translate(_IN_TERMINAL)


def seconds_in_text(number: float) -> str:
    """Returns what `seconds` does in such characters."""
    return seconds(number).translate(_IN_TERMINAL)


def percent(value: Any) -> str:
    """Returns a share in percent; a small one that is not zero is not shown as zero."""
    number = real(value)
    if number is None or not math.isfinite(number):
        return digits(value)
    hundredths = 100 * number
    if not hundredths:
        return f"0{_SPACE}%"
    if abs(hundredths) < 0.01:
        return f"<{_SPACE}0.01{_SPACE}%"
    decimals = 2 if abs(hundredths) < 1 else 1 if abs(hundredths) < 99.95 else 0
    text = f"{hundredths:.{decimals}f}"
    if text == "100" and number < 1:  # almost all is not all
        text = f">{_SPACE}99.9"
    return f"{text}{_SPACE}%"


def power_of_2(exponent: float) -> str:
    """Returns a power of 2, such as "2⁻¹⁴"."""
    return f"2{f'{exponent:g}'.translate(_SUPERSCRIPTS)}"
