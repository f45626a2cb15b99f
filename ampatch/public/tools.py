"""Explains, reports and tests: `amp.explain`, `report`, `preflight`, `what_if`, `compare`, `tune` and `replay`.

The functions import `ampatch.diagnostics` only when they are called.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ampatch import opt_levels
from ampatch.cast_lists.lists import Overlay, shipped
from ampatch.errors import OptionError
from ampatch.opt_levels import as_flag
from ampatch.patching import adopted_model
from ampatch.public import arguments
from ampatch.public.arguments import checks_names
from ampatch.torch_private.modules import COMPILED_ORIGINAL
from ampatch.weights.ruled_parts import check_entries

if TYPE_CHECKING:
    from ampatch.diagnostics.compare.result import Comparison
    from ampatch.diagnostics.explain.result import Explanation
    from ampatch.diagnostics.preflight.result import Preflight
    from ampatch.diagnostics.replay.result import Replay
    from ampatch.diagnostics.report.report import Report
    from ampatch.diagnostics.trial_steps.steps import Setup
    from ampatch.diagnostics.tune.result import Tuning
    from ampatch.diagnostics.what_if.result import WhatIf


def explain(function_or_name: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    """Explains what amp does to a function, or to the functions that a module calls, and which rule decides.

    ::

        print(amp.explain(torch.matmul, x, w))
        print(amp.explain(model.encoder))

    The explanation covers each spelling of the function, with the file and line of the rule and its comment. It also
    names the listed functions that the function calls, and other names, closures and containers that hold it. The call
    runs nothing and changes nothing. With amp on, it uses the settings of the session; with amp off, the shipped lists.

    Args:
        function_or_name: the function, bound or not, patched or not; its name ("softmax", "torch.softmax",
            "F.softmax") or an operator ("@"). Or a module, its class, or the name of one ("nn.LSTM"): the listed
            functions that the code of its forward names, and for a module those of all its submodules.
        args: arguments of a call. For each tensor among them, the explanation shows the dtype that the function would
            get. Not allowed for a module.
        kwargs: keyword arguments of the call.

    Returns:
        The explanation, which prints as text; ``to_dict()`` returns it as plain data.

    Raises:
        OptionError: it is none of these, a module is given with arguments, or its forward is not written in Python.
    """
    from ampatch.diagnostics.explain import explanation

    return explanation.explain(function_or_name, args, kwargs)


def report() -> Report:
    """Watches what runs in a block, and reports what amp does there.

    ::

        with amp.report() as report:
            train(model, loader)
        print(report)
        report.to_html("report.html")

    The report counts calls and casts by function and by line of the user's code, with bytes, times and uses of the
    cache. It shows the types and the memory of each module, the scale of each step and the exponents of the gradients.
    It gives advice on its findings. You may set amp up before the block, in it, or not at all.

    The report can also be read inside the block, and then shows what has run so far. After an exception it shows what
    ran until then. Results, random numbers, casts and the cache are the same as without a report. Steps take longer;
    the report says by how much. It covers this thread, and the backward passes that the thread starts.

    Returns:
        The report, to be entered once.
    """
    from ampatch.diagnostics.report.report import Report

    return Report()


def preflight(
    model: nn.Module,
    inputs: Any,
    loss_fn: Callable[[Any], Tensor],
    *,
    levels: Sequence[Any] = ("O1", "O2", "O3"),
    tolerance: float = 0.05,
    measure: bool = True,
) -> Preflight:
    """Finds the opt levels at which a model trains well, by running one step of copies of it at each.

    ::

        print(amp.preflight(model, batch, lambda output: F.cross_entropy(output, labels)))

    It first watches a float32 step, and notes values outside float16's range and operators whose results change much in
    bfloat16. Then it runs a step at each level and compares the gradients. If a level fails, it searches for the
    smallest change to the arguments of `initialize` that makes the level pass, and verifies the change with a step.

    The model, its gradients, its buffers and the random numbers stay as they are; code that the model calls runs many
    times. Compiled parts run uncompiled. The float32 step keeps the tensors of all its operators alive.

    Args:
        model: float32, on the CPU or a GPU, as it would be passed to `initialize`.
        inputs: one tensor; a tuple or list of the forward's arguments; or a mapping of its keyword arguments.
        loss_fn: returns the loss, a scalar tensor, for the model's output.
        levels: opt levels O1 to O5, each in float16 and bfloat16; or pairs of a level and a half type.
        tolerance: relative error above which an operator is reported as imprecise in bfloat16.
        measure: whether to measure time and peak memory of a step at each level.

    Returns:
        The verdicts and findings; it prints as a report.

    Raises:
        UsageError: amp is set up.
        OptionError: an argument has a value that is not allowed; the model cannot be copied; or ``loss_fn`` returns no
            scalar that depends on a parameter.
        Exception: what the model or ``loss_fn`` raises in float32, with a note that says so.
    """
    bound = tolerance if isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool) else math.nan
    if not 0 < bound < math.inf:
        raise OptionError(f"tolerance is {tolerance!r}; expected a positive number, such as 0.05.")
    from ampatch.diagnostics.preflight import preflight as preflights
    from ampatch.diagnostics.report.report import note_own_steps
    from ampatch.diagnostics.trial_steps.levels import checked_levels
    from ampatch.diagnostics.trial_steps.subject import Subject

    subject = Subject(model, inputs, loss_fn)
    note_own_steps("amp.preflight")
    return preflights.preflight(subject, checked_levels(levels), bound, as_flag("measure", measure))


def what_if(
    model: nn.Module,
    inputs: Any,
    loss_fn: Callable[[Any], Tensor],
    *,
    formats: Sequence[str | Mapping[str, str]],
    cast_lists: Overlay | None = None,
) -> WhatIf:
    """Says what number formats would do to each function and module of a model, from one float32 step of a copy.

    ::

        result = amp.what_if(model, batch, lambda output: F.cross_entropy(output, labels), formats=["float8_e4m3"])
        print(result)
        result.save("casts.yaml", "float8_e4m3")

    Each call of a whitelisted function runs as it is, and then once for each format, with its arguments rounded as amp
    rounds them for a ``format`` in cast lists. Gradients of its results are rounded when they arrive. The result counts
    values that become zero, are beyond the format's range, or lose a digit otherwise.

    Rows are ranked by noise, an estimate of the relative error that the format adds to the step. It joins, as the root
    of the sum of squares over all calls, |result of rounded arguments - result| / |result|, and the same for the
    gradients of arguments. The error of a gradient counts by the share that the parameters before the call have in the
    squared norm of all gradients: only those learn from it. The errors of results count, not those of arguments: a bias
    may lose all its digits without harm, but the same small loss in each row of a batch adds up.

    The gradients are those of a loss scale of 1. The model, its gradients, its buffers and the random numbers stay as
    they are. Compiled parts run uncompiled.

    Args:
        model: float32, on the CPU or a GPU, as it would be passed to `initialize`.
        inputs: one tensor; a tuple or list of the forward's arguments; or a mapping of its keyword arguments.
        loss_fn: returns the loss, a scalar tensor, for the model's output.
        formats: formats as in cast lists: "float8_e4m3", "e3m4", ``{"name": "float8_e4m3", "scale": "row"}``.
        cast_lists: as for `initialize`: functions on the whitelist are judged.

    Returns:
        The rows, and the cast lists that follow; it prints as tables.

    Raises:
        UsageError: amp is set up.
        OptionError: an argument has a value that is not allowed; the model cannot be copied; or ``loss_fn`` returns no
            scalar that depends on a parameter.
        CastListError: the cast lists have faults.
        Exception: what the model or ``loss_fn`` raises, with a note that says so.
    """
    from ampatch.diagnostics.report.report import note_own_steps
    from ampatch.diagnostics.trial_steps.subject import Subject
    from ampatch.diagnostics.what_if import what_if as steps
    from ampatch.diagnostics.what_if.given import checked_formats

    subject, lists = Subject(model, inputs, loss_fn), arguments.lists_of(cast_lists)
    note_own_steps("amp.what_if")
    return steps.what_if(subject, checked_formats(formats), lists.expanded())


def compare(
    model: nn.Module | str | os.PathLike[str],
    inputs: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    a: Any = "O0",
    b: Any = "O1",
) -> Comparison:
    """Runs the same step twice, and shows where the results differ first and most; or compares two saved reports.

    ::

        print(amp.compare(model, batch, lambda output: F.cross_entropy(output, labels), "O0", "O1"))
        print(amp.compare("monday.json", "tuesday.json"))

    Both steps run on copies of the model with the same random numbers, dropout included, and the same loss scale.
    Calls are matched by function, module and line, in forward and backward pass. Each operator of b also runs on a's
    inputs, to separate its own error from the error of its inputs. An error counts if it exceeds the rounding noise of
    the half type.

    The model, its gradients, its buffers and the random numbers stay as they are. Both steps keep the tensors of all
    their operators alive. Compiled parts run uncompiled.

    Args:
        model: float32, on the CPU or a GPU, as it would be passed to `initialize`; or the file of a saved report.
        inputs: one tensor; a tuple or list of the forward's arguments; or a mapping of its keyword arguments. After a
            file, the file to compare it with.
        loss_fn: returns the loss, a scalar tensor, for the model's output; left out for files.
        a: the step to compare with: an opt level; or a mapping with ``opt_level`` and optionally ``half_dtype`` and
            ``cast_lists``, whose defaults are those of `initialize`.
        b: the step to judge, in the same form.

    Returns:
        The rows and a verdict; it prints as tables.

    Raises:
        UsageError: amp is set up.
        OptionError: an argument has a value that is not allowed; the model cannot be copied; ``loss_fn`` returns no
            scalar that depends on a parameter; or a file is no report.
        CastListError: cast lists have faults.
        Exception: what the model or ``loss_fn`` raises, with a note that says at which level.
    """
    if isinstance(model, (str, os.PathLike)):
        if loss_fn is not None or (a, b) != ("O0", "O1"):
            raise OptionError(
                "amp.compare takes a model, its inputs and loss_fn; or two files of reports and nothing else."
            )
        from ampatch.diagnostics.compare import files as comparison_files

        return comparison_files.compare(model, inputs)
    from ampatch.diagnostics.report.report import Report, note_own_steps

    if isinstance(model, (Report, Mapping)):
        raise OptionError(
            f"found {type(model).__name__} as the first argument; expected a model, or the file of a saved report. "
            "Type report.save('a.json') for each report, then amp.compare('a.json', 'b.json')."
        )
    from ampatch.diagnostics.compare import comparison
    from ampatch.diagnostics.trial_steps.subject import Subject

    subject = Subject(model, inputs, loss_fn)
    note_own_steps("amp.compare")
    return comparison.compare(subject, _side("a", a, subject.model), _side("b", b, subject.model))


def _side(letter: str, given: object, model: nn.Module) -> Setup:
    """Returns one of the two steps of `compare`."""
    from ampatch.diagnostics.trial_steps.steps import Setup

    options = {"opt_level": given} if isinstance(given, str) else given
    if not isinstance(options, Mapping):
        raise OptionError(f"{letter} is {given!r}; expected an opt level ('O1'), or a mapping with 'opt_level'.")
    opt_levels.check_names(options, ("opt_level", "half_dtype", "cast_lists"), f"{letter} has")
    level, overlay = options.get("opt_level", "O1"), options.get("cast_lists")
    try:
        half = arguments.half_dtype_of(options.get("half_dtype"), None, "", level, [model])
        properties = opt_levels.resolve(level, half)
        if overlay is not None and not properties.patch_torch_functions:
            arguments.check_have_effect(arguments.lists_of(overlay, level), properties)
    except OptionError as error:
        raise OptionError(f"in {letter}: {error}") from None
    half_name = "" if level == "O0" else f" {opt_levels.dtype_name(properties.half_dtype)}"
    lists = "" if overlay is None else f" with {overlay if isinstance(overlay, (str, os.PathLike)) else 'cast_lists'}"
    overlaid = () if overlay is None else overlay
    setup = Setup(level, properties.half_dtype, overlay=overlaid, name=f"{level}{half_name}{lists}")
    check_entries([model], setup.settings().lists.modules_of_user(level))  # raises also if the lists have faults
    return setup


@checks_names
def tune(
    train: Callable[[dict[str, Any]], Any],
    evaluate: Callable[[Any], Any],
    *,
    tolerance: float | str,
    higher_is_better: bool,
    budget: Any = None,
    seeds: int | Sequence[int] = 3,
    opt_level: str = "O1",
    half_dtype: torch.dtype | str | None = None,
    cast_lists: Overlay | None = None,
    journal: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Tuning:
    """Finds the smallest cast list that preserves the metric of a training run and leaves the most FLOPs in half.

    ::

        def train(amp_options):
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = amp.initialize(model, optimizer, **amp_options)
            ...
            return model

        tuning = amp.tune(train, accuracy, tolerance=0.005, higher_is_better=True, budget="2h", journal="tune.json")
        print(tuning)
        tuning.save("casts.yaml")

    It trains in float32 first, then with the unchanged lists. If the metric stays within the tolerance, these lists are
    the result. Otherwise it moves functions that got half tensors to float32: all whitelisted functions, then halves of
    these, then single functions. At the end it tries to move each one back. Every trial trains with all seeds, and its
    metrics are compared with those of float32 for the same seeds. A list passes if its metric is worse by at most the
    tolerance, after two standard errors of noise are added. If the noise is too large to decide, the result says so.

    Before each run it sets torch's, Python's and numpy's seeds. Afterwards random numbers and torch's settings are as
    they were, and amp is off.

    Args:
        train: trains a new model, and returns it. Its argument is a dict for ``amp.initialize``: ``opt_level`` ("O0"
            for float32) and, in other runs, perhaps ``half_dtype`` and ``cast_lists``. If it uses a generator of its
            own, it must seed it with ``torch.initial_seed()``.
        evaluate: returns the metric of a trained model, one number. amp is still on, unless ``train`` has turned it
            off.
        tolerance: how much worse the metric may be: a number in its unit, or a share of float32's metric ("1%").
        higher_is_better: True for an accuracy, False for a loss.
        budget: a time ("2h", "90 min", "45 s", or a ``timedelta``) or a number of runs ("20 runs"), for this call. A
            run that would not fit is not started; the result is then the best list so far. None: no limit.
        seeds: a number of seeds, or the seeds.
        opt_level: "O1" or "O4".
        half_dtype: as for `initialize`.
        cast_lists: lists to start with, as for `initialize`; pass the result after them.
        journal: a JSON file that stores every finished run. If it exists, its runs are not repeated.
        progress: whether to print a line for each run to standard error, with the time left.

    Returns:
        The list with its evidence: ``overlay`` is its YAML, ``save`` writes it. It prints as a report.

    Raises:
        UsageError: amp is set up, or the call is in a block of `report`.
        OptionError: an argument has a value that is not allowed; the metric is not finite in float32; or the journal
            is of another search. Also if ``train`` does not use its argument, sets the seed, or returns the same model
            twice.
        CastListError: the cast lists have faults.
        Exception: what ``train`` or ``evaluate`` raises in float32, with a note that says so.
    """
    from ampatch.diagnostics.tune import tuning
    from ampatch.diagnostics.tune.runs import Runs
    from ampatch.diagnostics.tune.trainings import Training

    for name, given, does in (
        ("train", train, "trains a new model with a dict of options, and returns it"),
        ("evaluate", evaluate, "returns the metric of a model"),
    ):
        if not callable(given):
            raise OptionError(f"{name} is {type(given).__name__!r}; expected a function that {does}.")
    if not isinstance(higher_is_better, bool):
        raise OptionError(
            f"higher_is_better is {higher_is_better!r}; expected True, as for an accuracy, or False, as for a loss."
        )
    half = None if half_dtype is None else arguments.half_dtype_of(half_dtype, None, "", opt_level, [])
    if not opt_levels.LEVELS[opt_levels.check_opt_level(opt_level)].patched:
        raise OptionError(f"opt_level is {opt_level!r}, which casts no functions by lists; expected 'O1' or 'O4'.")
    options = {"opt_level": opt_level, **({} if half is None else {"half_dtype": opt_levels.dtype_name(half)})}
    several = isinstance(cast_lists, Sequence) and not isinstance(cast_lists, (str, bytes, os.PathLike))
    overlays: Any = cast_lists if several else () if cast_lists is None else (cast_lists,)
    lists = shipped().overlaid(overlays)
    training = Training(train, evaluate, options, tuple(overlays), lists, tuning.checked_seeds(seeds))
    return tuning.tune(Runs(training, journal, budget, as_flag("progress", progress)), tolerance, higher_is_better)


def replay(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    *,
    levels: Any = None,
    compiled: bool = False,
) -> Replay:
    """Runs a skipped step again, from the file that `Overflow.save` has written.

    ::

        print(amp.replay("step.pt", make_model()))

    It loads the weights, buffers and modes of the step into copies of the models, sets amp up with the settings of the
    run, and runs the forward passes on the saved inputs and random numbers. Backward passes begin with the saved
    gradients of the outputs, at the loss scale of the step. Then it repeats this at other opt levels, with the same
    cast lists. On a different device than in the run, random numbers may differ.

    Args:
        path: the file.
        model: a model of the class that ran the step, on the CPU or a GPU; its weights are not used. For several
            models, such as those of a GAN: a list in the order in which they ran.
        levels: opt levels to try after float32, as for `preflight`; None: O1 and O2 in both half types, and O3 in
            float16.
        compiled: whether to also try models compiled by ``torch.compile``.

    Returns:
        The trace, and a table of the levels at which all gradients are finite; it prints as both.

    Raises:
        UsageError: amp is set up.
        OptionError: the file holds no step, the models do not match it, or a level does not exist.
    """
    from ampatch.diagnostics.replay import replay as replays
    from ampatch.diagnostics.trial_steps.levels import checked_levels

    given = model if isinstance(model, (list, tuple)) else [model]
    wrappers = adopted_model.WRAPPERS  # the file has the models inside of them
    bare = (each.module if isinstance(each, wrappers) else getattr(each, COMPILED_ORIGINAL, each) for each in given)
    models = [adopted_model.check_model(each) for each in bare]
    chosen = checked_levels(replays.LEVELS if levels is None else levels)
    return replays.replay(path, models, chosen, compiled=as_flag("compiled", compiled))
