"""Searches a small set of functions in float32 with which a training passes, by asking whether sets pass.

Must not run a training, nor know what passing means: the caller's function does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Paths of the functions that run in float32.
Kept = frozenset[str]


def minimal(passes: Callable[[Kept], bool], ordered: Sequence[str]) -> Kept:
    """Returns a part of a set that passes and needs each of its functions.

    Assumes that a set passes if a part of it does. The algorithm is QuickXplain (U. Junker, "QuickXplain: preferred
    explanations and relaxations for over-constrained problems", AAAI 2004). It halves the set again and again. To find
    k of n functions, it calls ``passes`` about 2 k log2(n / k) + 2 k times.

    Args:
        passes: returns whether a set passes.
        ordered: the set, which passes. Of several results it prefers those of earlier functions.
    """
    if not ordered or passes(frozenset()):
        return frozenset()
    return _needed(passes, frozenset(), frozenset(), list(ordered))


def _needed(passes: Callable[[Kept], bool], given: Kept, added: Kept, ordered: list[str]) -> Kept:
    """Returns the functions of a list that are needed beside the given ones; ``added`` are the last of these."""
    if added and passes(given):
        return frozenset()
    if len(ordered) == 1:
        return frozenset(ordered)
    middle = len(ordered) // 2
    first, second = ordered[:middle], ordered[middle:]
    of_second = _needed(passes, given | frozenset(first), frozenset(first), second)
    of_first = _needed(passes, given | of_second, of_second, first)
    return of_first | of_second


def restored(passes: Callable[[Kept], bool], kept: Kept, order: Sequence[str]) -> Kept:
    """Returns a set without each function that it does not need; every one left was tried singly.

    Args:
        passes: returns whether a set passes.
        kept: a set that passes.
        order: its functions, in the order in which to try to leave them out.
    """
    for path in order:
        if path in kept and passes(kept - {path}):
            return restored(passes, kept - {path}, order)
    return kept
