"""Searches the smallest change of ``amp.initialize``'s arguments with which a level stands, and verifies it by runs.

Must never report a change as verified unless a run has shown that the level stands with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.rules import Treatment
from ampatch.diagnostics.examiner import overlay_for
from ampatch.diagnostics.preflight_operators import Operators
from ampatch.diagnostics.preflight_report import FAILS, INACCURATE
from ampatch.diagnostics.preflight_steps import Part, Setup
from ampatch.diagnostics.preflight_trials import Trial

#: Parts that are added to a change before the search gives up.
LIMIT = 8

#: A share of flushed gradient values that makes another loss scale the first thing to try.
_MANY_FLUSHED = 0.01


@dataclass(frozen=True, slots=True)
class Mended:
    """The outcome of a search.

    Attributes:
        trial: the last run with the change, which stands; None if no change was found.
        runs: number of runs that the search took.
    """

    trial: Trial | None
    runs: int


def mended(
    first: Trial, operators: Operators, flushed: float | None, run: Callable[[Setup], Trial], banned: Sequence[str]
) -> Mended:
    """Searches a change: adds parts until the level stands, then drops those that are not needed.

    Args:
        first: the run without a change, which does not stand.
        operators: what is known of the float32 step.
        flushed: share of gradient values that float16 flushes at the scale of the first run; None in bfloat16.
        run: runs a step with a setup.
        banned: paths of banned functions that the float32 step called.
    """
    runs, current, seen = 0, first, set(first.setup.parts)
    while not current.stands and runs < LIMIT:
        candidates = _candidates(current, operators, flushed, banned)
        part = next((each for each in candidates if each not in seen), None)
        if part is None:
            return Mended(None, runs)
        seen.add(part)
        others = [each for each in current.setup.parts if not each.argument == part.argument == "loss_scale"]
        trial = run(replace(current.setup, parts=(*others, part)))  # a change has one loss scale
        runs += 1
        if trial.level.verdict != FAILS or (current.level.verdict == FAILS and not trial.is_refused):
            current = trial
    if not current.stands:
        return Mended(None, runs)
    for part in current.setup.parts[:-1]:  # the last one is what made it stand
        fewer = run(replace(current.setup, parts=tuple(each for each in current.setup.parts if each != part)))
        runs += 1
        if fewer.stands:
            current = fewer
    return Mended(current, runs)


def _candidates(trial: Trial, operators: Operators, flushed: float | None, banned: Sequence[str]) -> Iterator[Part]:
    """Yields parts of a change, the likeliest first."""
    static = trial.setup.properties.loss_scale != "dynamic"
    if (
        trial.level.trace is not None
        and trial.level.trace.max_loss_scale is not None
        and static
        and trial.level.verdict != FAILS
    ):
        yield Part("loss_scale", trial.level.trace.max_loss_scale)
    if static and trial.level.verdict == INACCURATE and flushed is not None and flushed >= _MANY_FLUSHED:
        yield Part("loss_scale", "dynamic")
    patches = trial.setup.properties.patch_torch_functions
    yield from _of_functions(trial, operators, banned) if patches else _of_modules(trial, operators)


def _of_functions(trial: Trial, operators: Operators, banned: Sequence[str]) -> Iterator[Part]:
    if trial.level.verdict == FAILS:
        unlisted = (
            f"{each.function}.apply" if each.kind == "autograd.Function" else each.function
            for each in operators.unlisted
        )
        for path in [*banned, *unlisted]:
            yield from _blacklisting(overlay_for(path))
        return
    if trial.level.trace is not None:
        yield from _blacklisting(trial.level.trace.cast_lists)
        yield from _blacklisting(overlay_for(trial.level.trace.function))
    for suspect in operators.suspects:
        yield from _blacklisting(overlay_for(suspect.function))


def _blacklisting(overlay: dict[str, dict[str, list[str]]] | None) -> Iterator[Part]:
    for namespace, names in {} if overlay is None else overlay["blacklist"].items():
        for name in names:
            if namespace and not namespace.startswith("torch.ops.aten"):  # an operator without a function
                yield Part("blacklist", (namespace, name))


def _of_modules(trial: Trial, operators: Operators) -> Iterator[Part]:
    names = list(trial.around)
    if trial.level.verdict != FAILS:
        for suspect in operators.suspects:
            names += suspect.modules[:1]
        for suspect in operators.suspects:
            names += suspect.modules[1:]
    for name in dict.fromkeys(names):
        yield Part("keep_fp32", name)


def banned_functions(functions: Sequence[str]) -> list[str]:
    """Returns those of the functions' paths that the shipped lists ban for float16."""
    paths = {str(path) for (path, half), rule in shipped().rules.items() if rule.treatment is Treatment.BANNED}
    return [each for each in dict.fromkeys(functions) if each in paths]
