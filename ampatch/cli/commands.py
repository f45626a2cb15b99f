"""Defines all subcommands of `ampatch` except `run`: their arguments, the functions they call, and their output.

Must never compute results, or catch an error that `main` turns into an exit status. Each subcommand imports its own
modules: `ampatch --help` must not wait for torch, and `ampatch lists` must not wait for the code that patches torch.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampatch.cli.users_errors import in_one_error
from ampatch.errors import CastListError, KernelError, OptionError, did_you_mean, faults

if TYPE_CHECKING:
    import torch

_STEP = "the model, its inputs and a loss function"
_TO_LOOK_UP = "so that its functions are looked up, and matched by the file's patterns"
_FAULT = 1  # exit status for a fault in the input, or for a warning with --strict

# Half types of peers that have only one.
_PEER_HALF_DTYPES = {"apex": ["float16"]}


def add_to(commands: Any, command: str | None) -> None:
    """Adds these subcommands to a parser.

    Args:
        commands: object returned by ``add_subparsers``.
        command: name of the subcommand on the command line, if any. Only this one gets its arguments: their names and
            defaults come from modules that no other subcommand should wait for.
    """
    _add_all(commands, _COMMANDS, (command,))


def _add_all(commands: Any, table: _Commands, chosen: Collection[str | None]) -> None:
    """Adds subcommands, with the arguments of some; the help is the docstring of what adds the arguments."""
    for name, (add_arguments, run) in table.items():
        about = add_arguments.__doc__
        parser = commands.add_parser(name, help=about, description=about)
        parser.set_defaults(run=run)
        if name in chosen:
            add_arguments(parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    """Trains a small network in float32 and in mixed precision, and compares the two."""
    from ampatch import demo

    demo.add_arguments(parser)


def _demo(arguments: argparse.Namespace) -> int:
    from ampatch import demo

    return demo.run(arguments)


def _add_lists(parser: argparse.ArgumentParser) -> None:
    """Shows, checks and compares the cast lists."""
    reports = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_all(reports, _LISTS, _LISTS)


def _add_show(parser: argparse.ArgumentParser) -> None:
    """Prints the rules in force, each with the file and line it comes from."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="show only the rules of these functions: a name (softmax), a path (torch.softmax), a namespace "
        "(torch.fft), a pattern ('*_loss') or an operator (@)",
    )
    _add_half_dtype(parser, "the half type to show the rules of (default: both)")
    _add_cast_lists(parser)
    _add_import(parser)


def _show(arguments: argparse.Namespace) -> int:
    from ampatch.cast_lists import list_reports
    from ampatch.cast_lists.lists import shipped

    _import(arguments.modules)
    with _searching_here():
        lists = shipped().overlaid(arguments.cast_lists)
    _print(list_reports.policy(lists, arguments.half_dtype or list_reports.BOTH, arguments.names))
    return 0


def _add_check(parser: argparse.ArgumentParser) -> None:
    """Prints the faults of cast list files, one line per fault."""
    parser.add_argument(
        "files",
        nargs="+",
        type=_file,
        metavar="FILE",
        help="a file as `amp.initialize(cast_lists=...)` takes it; several are checked separately, and the exit status "
        "is 1 if any has a fault",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with status 1 also if a function's inner calls undo an edit (`amp.initialize` warns of it)",
    )
    _add_import(parser)


def _check(arguments: argparse.Namespace) -> int:
    from ampatch.cast_lists import list_reports
    from ampatch.cast_lists.lists import shipped

    _import(arguments.modules)
    status = 0
    for file in arguments.files:
        try:
            with _searching_here():
                changed = shipped().overlaid(file)  # must read it only once: it may be a pipe
        except CastListError as error:
            _print(faults(error))
            status = _FAULT
            continue
        checked = list_reports.checked(file, shipped(), changed)
        _print(checked.lines)
        if arguments.strict and checked.warns:
            status = _FAULT
    return status


def _add_diff(parser: argparse.ArgumentParser) -> None:
    """Prints where the casts of another system, or of a file of yours, differ from ampatch's own lists."""
    from ampatch.cast_lists.lists import PEERS

    parser.add_argument(
        "other",
        type=_peer_or_file,
        metavar="SYSTEM | FILE",
        help=f"the system to compare with ({', '.join(PEERS)}), or a file as `amp.initialize(cast_lists=...)` takes it",
    )
    _add_half_dtype(parser, "the half type to compare in (default: those that the other system has)")
    _add_import(parser)


def _peer_or_file(text: str) -> str:
    from ampatch.cast_lists.lists import PEERS
    from ampatch.cast_lists.yaml_tree import unexpanded

    file = _file(text)
    if text in PEERS or Path(file).exists():
        return file
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither one of {', '.join(PEERS)}, nor a file that exists."
        f"{did_you_mean(text, PEERS)}{unexpanded(text)}"
    )


def _diff(arguments: argparse.Namespace) -> int:
    from ampatch.cast_lists import list_reports
    from ampatch.cast_lists.lists import PEERS, peer, shipped
    from ampatch.half_types import HALF_DTYPES

    other = arguments.other
    _import(arguments.modules)
    of_peer = tuple(HALF_DTYPES[name] for name in _PEER_HALF_DTYPES.get(other, HALF_DTYPES))
    half_dtypes = arguments.half_dtype or of_peer
    if other in PEERS:
        lines = list_reports.difference(peer(other), shipped(), other, half_dtypes)
    else:
        with _searching_here():
            lines = list_reports.changes(shipped(), shipped().overlaid(other), other, half_dtypes)
    _print(lines)
    return 0


def _add_coverage(parser: argparse.ArgumentParser) -> None:
    """Prints every function of torch with its list, or with the reason why it is in none."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as JSON; in either form the exit status is 1 if torch has functions without a decision",
    )


def _coverage(arguments: argparse.Namespace) -> int:
    from ampatch.cast_lists import coverage, list_reports
    from ampatch.cast_lists.lists import shipped

    found = coverage.coverage(shipped())
    _print([json.dumps(found.to_dict(), indent=2)] if arguments.json else list_reports.covered(found))
    return _FAULT if found.undecided else 0


def _add_explain(parser: argparse.ArgumentParser) -> None:
    """Explains what amp does to a function, or to those that a module calls: by which rule and line, and why."""
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a function's name (softmax), its path (torch.softmax, F.softmax, mypackage.loss), an operator (@), or "
        "the class of a module (nn.LSTM)",
    )
    _add_half_dtype(parser, "the half type to explain (default: both)")
    _add_cast_lists(parser)
    _add_import(parser, "to explain a function of it, or to see which names in it are patched")
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")


def _explain(arguments: argparse.Namespace) -> int:
    from ampatch.cast_lists.lists import shipped
    from ampatch.diagnostics.explain import explanation

    _import(arguments.modules)
    with _searching_here():
        lists = shipped().overlaid(arguments.cast_lists)
        found = explanation.explain(arguments.name, lists=lists, half_dtypes=arguments.half_dtype or ())
    _print_result(found, arguments)
    return 0


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    """Prints the facts a bug report needs: versions, devices, kernels, and who patched which torch functions."""
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="MODULE",
        help="module to import first, such as your own or a plug-in that patches torch",
    )
    parser.add_argument(
        "--device-check",
        nargs="?",
        const="",
        metavar="DEVICE",
        help="compute in each half type on a device, such as cuda:1, and say which types are safe there; without a "
        "DEVICE: on the GPU, or else the CPU",
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from ampatch import amp, device_check, doctor
    from ampatch.runtime import runtime

    _import(arguments.modules)
    if arguments.device_check is not None:
        checked = device_check.check(arguments.device_check)
        _print(checked.lines())
        return 0 if checked.safe else 1
    is_set_up = runtime.live is not None  # by one of the modules
    with ExitStack() as stack:
        try:
            if not is_set_up:
                stack.enter_context(amp.init())
        finally:  # also if that fails: the report helps to explain the failure
            _print(doctor.report())
    if not is_set_up:
        _print(["", "amp was set up for this report alone, with the defaults of amp.init()."])
    return 0


def _import(modules: Iterable[str]) -> None:
    with _searching_here():
        for module in modules:
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:  # a user's module may raise anything
                told = f"the module {module!r} cannot be imported ({type(error).__name__}: {error})"
                hint = f"Type the name that stands after `import`, such as package.module.{_similar_module(module)}"
                raise in_one_error(told, error, f"import {module}", otherwise=hint) from error


def _similar_module(name: str) -> str:
    """Returns a hint with modules of similar names, in the same package or in the current folder; empty without one."""
    package = name.rpartition(".")[0]
    imported = sys.modules.get(package)
    folders = getattr(imported, "__path__", []) if package else [""]
    found = [f"{package}.{each.name}".lstrip(".") for each in pkgutil.iter_modules(folders)]
    return did_you_mean(name, [*found, *([] if imported is None else [package])])


@contextmanager
def _searching_here() -> Iterator[None]:
    """Puts the current folder on sys.path, as `python -m` does, so that the user's modules are found there."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove("")


def _add_target(parser: argparse.ArgumentParser, returned: str) -> None:
    told = f"a function without arguments that returns {returned}; the module is searched for in the current folder too"
    parser.add_argument("target", metavar="MODULE:FUNCTION", help=told)


def _add_level(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--level",
        action="append",
        default=[],
        metavar="LEVEL",
        help=f"an opt level to try (default: {default}); may be given several times",
    )


def _add_preflight(parser: argparse.ArgumentParser) -> None:
    """Tells which opt levels a model passes, and what to change for the others."""
    _add_target(parser, "a model, its inputs and a loss function, as `amp.preflight` takes them")
    _add_level(parser, "O1, O2 and O3")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--no-measure", action="store_true", help="measure neither time nor memory")


def _preflight(arguments: argparse.Namespace) -> int:
    from ampatch import amp
    from ampatch.diagnostics.trial_steps.levels import checked_levels

    levels = arguments.level or ("O1", "O2", "O3")
    checked_levels(levels)  # before the user's model is built
    with _searching_here():  # while it runs too: the model may import what it needs late
        result = _returned(arguments.target, "one_step", _STEP)
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            raise OptionError(f"{arguments.target} returned {_shape(result)}; expected three: {_STEP}.")
        model, inputs, loss_fn = result
        with _naming(arguments.target, _step_of(arguments.target, inputs)):
            result = amp.preflight(model, inputs, loss_fn, levels=levels, measure=not arguments.no_measure)
    _print_result(result, arguments)
    return 0 if any(each.verdict == "passes" for each in result.levels) else _FAULT


def _add_replay(parser: argparse.ArgumentParser) -> None:
    """Runs a skipped step again from its file: where inf or NaN arose, and at which opt levels it does not."""
    parser.add_argument("file", type=_file, metavar="FILE", help="what `overflow.save` has written, such as step.pt")
    _add_target(parser, "a model of the same class, or several as `amp.replay` takes them")
    _add_level(parser, "O1 and O2 in both half types, and O3")
    parser.add_argument("--compiled", action="store_true", help="try it compiled by torch.compile as well")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _replay(arguments: argparse.Namespace) -> int:
    from ampatch import amp
    from ampatch.diagnostics.overflow import step_file
    from ampatch.diagnostics.trial_steps.levels import checked_levels

    if arguments.level:
        checked_levels(arguments.level)
    step_file.read(arguments.file)  # before the user's model is built
    with _searching_here():
        model = _returned(arguments.target, "make_model", "a model")
        result = amp.replay(arguments.file, model, levels=arguments.level or None, compiled=arguments.compiled)
    _print_result(result, arguments)
    return 0 if result.levels[0].is_finite is not None else _FAULT


@contextmanager
def _naming(target: str, code: str) -> Iterator[None]:
    """Names the user's function in the errors of a block that runs what it returned.

    Args:
        target: the module and the function, as "module:function".
        code: Python that runs this code without ampatch.
    """
    from ampatch.diagnostics.trial_steps.subject import is_users

    try:
        yield
    except OptionError as error:
        raise OptionError(f"{target}: {error}") from error
    except (Exception, SystemExit) as error:
        if not is_users(error):
            raise  # with the traceback, since it is a fault of ampatch
        raise in_one_error(f"{target}: {type(error).__name__}: {error}", error, code) from error


def _returned(target: str, example: str, expected: str) -> Any:
    """Returns what the user's function returns.

    Args:
        target: the module and the function, as "module:function".
        example: a function's name for messages.
        expected: what it is to return, for messages.
    """
    module_name, separator, name = target.partition(":")
    is_path = module_name.endswith(".py") or "/" in module_name
    if not (separator and name and module_name) or is_path:
        module_name = ".".join(Path(module_name).with_suffix("").parts) if is_path else module_name or "train"
        raise OptionError(
            f"found {target!r}; expected MODULE:FUNCTION, such as {module_name}:{name or example}. The module is "
            f"named as in `import`, and the function returns {expected}."
        )
    _import([module_name])
    module = sys.modules[module_name]
    function = getattr(module, name, None)
    if not callable(function):
        found = f"no {name!r}" if function is None else f"{name!r} of type {type(function).__name__}"
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise OptionError(f"the module {module_name!r} has {found}; expected a function.{did_you_mean(name, names)}")
    try:
        return function()
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        told = f"{target} raised {type(error).__name__}: {error}"
        hint = f"It is called without arguments, and is to return {expected}."
        raise in_one_error(told, error, f"import {module_name}; {module_name}.{name}()", otherwise=hint) from error


def _shape(result: object) -> str:
    return f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__


def _step_of(target: str, inputs: object) -> str:
    """Returns Python that runs the user's step without ampatch."""
    module, _, function = target.partition(":")
    stars = "*" if isinstance(inputs, (tuple, list)) else "**" if isinstance(inputs, Mapping) else ""
    return f"import {module}; model, inputs, loss_fn = {module}.{function}(); loss_fn(model({stars}inputs)).backward()"


def _add_tune(parser: argparse.ArgumentParser) -> None:
    """Finds the smallest cast list with which a training keeps its metric, by trainings."""
    _add_target(parser, "the functions train and evaluate, or a dict of the arguments of `amp.tune`")
    parser.add_argument("--tolerance", metavar="NUMBER | N%", help="how much worse the metric may be")
    better = parser.add_mutually_exclusive_group()
    better.add_argument("--higher-is-better", action="store_true", help="the metric is such as an accuracy")
    better.add_argument(
        "--lower-is-better", dest="higher_is_better", action="store_false", help="the metric is such as a loss"
    )
    parser.add_argument("--budget", metavar="TIME | RUNS", help="'2h', '90 min' or '20 runs' (default: no limit)")
    parser.add_argument("--seeds", type=_seeds, metavar="N | LIST", help="a number of seeds, or seeds such as 0,1,2")
    parser.add_argument("--opt-level", metavar="LEVEL", help="O1 (default) or O4")
    _add_half_dtype(parser, "the half type (default: float16 for parameters on a GPU, else bfloat16)")
    _add_cast_lists(parser)
    parser.add_argument(
        "--out",
        type=_file,
        metavar="FILE",
        default="casts.yaml",
        help="where to write the list (default: casts.yaml); a file that `ampatch tune` wrote before is replaced",
    )
    parser.add_argument(
        "--journal",
        type=_file,
        metavar="FILE",
        help="where finished runs are kept; a later call goes on from there (default: as --out, ending in .tune.json)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(higher_is_better=None)


def _tune(arguments: argparse.Namespace) -> int:
    from ampatch import amp

    out, target = _file_of_tuning(arguments), arguments.target
    with _searching_here():  # while it runs too: the training may import what it needs late
        given, known = _of_tuning(target)
        typed = {name: value for name, value in vars(arguments).items() if name in known and value not in (None, [])}
        if arguments.half_dtype is not None:
            (typed["half_dtype"],) = arguments.half_dtype
        options = {"journal": str(out.with_suffix(".tune.json")), **given, **typed}
        flags = {"tolerance": "--tolerance 0.005", "higher_is_better": "--higher-is-better or --lower-is-better"}
        missing = [name for name in flags if name not in options]
        if missing:
            to_type = " and ".join(flags[name] for name in missing)
            raise OptionError(f"{target}: {' and '.join(missing)} not given. Type {to_type}.")
        try:
            with _naming(target, _training_of(target, given)):
                result = amp.tune(**options)
        except KeyboardInterrupt:
            if options["journal"] is not None:
                sys.stderr.write(f"Stopped. The same command goes on after the last run in {options['journal']}.\n")
            raise
    _print_result(result, arguments)
    if result.verdict != "passes":
        return _FAULT
    result.save(out)
    if not arguments.json:
        lists = repr(str(out)) if not result.cast_lists else f"[..., {str(out)!r}], after the lists that it began with"
        _print(["", f"Written to {out}. Type amp.initialize(..., cast_lists={lists})."])
    return 0


def _file_of_tuning(arguments: argparse.Namespace) -> Path:
    """Returns the file to write; raises if that would replace a list of the user's."""
    from ampatch.diagnostics import json_files
    from ampatch.diagnostics.tune.result import MARK

    out = json_files.checked_list(arguments.out)
    if out.exists() and not out.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise OptionError(f"{out} exists, and `ampatch tune` has not written it. Type --out with another name.")
    if any(Path(each).resolve() == out.resolve() for each in arguments.cast_lists):
        raise OptionError(f"{out} is among --cast-lists, and would be replaced. Type --out with another name.")
    return out


def _of_tuning(target: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the arguments of `amp.tune` that the user's function returns, and the names of all."""
    from ampatch import amp
    from ampatch.opt_levels import check_names

    expected = "train and evaluate, or a dict of the arguments of amp.tune"
    result = _returned(target, "training", expected)
    if isinstance(result, (tuple, list)) and len(result) == 2:
        result = {"train": result[0], "evaluate": result[1]}
    if not isinstance(result, Mapping):
        raise OptionError(f"{target} returned {_shape(result)}; expected {expected}.")
    known = list(inspect.signature(amp.tune).parameters)
    check_names(result, known, f"{target} returned")
    missing = [name for name in ("train", "evaluate") if name not in result]
    if missing:
        raise OptionError(f"{target} returned a dict without {' and '.join(map(repr, missing))}.")
    return dict(result), known


def _training_of(target: str, given: Mapping[str, Any]) -> str:
    """Returns Python that runs the user's training in float32 without ampatch's search."""
    module, _, function = target.partition(":")
    names, call = "given", "given['evaluate'](given['train']({'opt_level': 'O0'}))"
    if set(given) == {"train", "evaluate"}:
        names, call = "train, evaluate", "evaluate(train({'opt_level': 'O0'}))"
    return f"import {module}; {names} = {module}.{function}(); {call}"


def _seeds(text: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of seeds (3), or seeds (0,1,2)") from None
    return numbers[0] if "," not in text else numbers


def _add_compare(parser: argparse.ArgumentParser) -> None:
    """Tells in which numbers two saved reports differ most: casts, bytes, steps, gradients that underflow."""
    for name in ("a", "b"):
        parser.add_argument(name, type=_file, metavar=f"{name.upper()}.json", help="a file that report.save() wrote")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _compare(arguments: argparse.Namespace) -> int:
    from ampatch.diagnostics.compare import files as comparison_files

    result = comparison_files.compare(arguments.a, arguments.b)
    _print_result(result, arguments)
    return 0


def _add_build(parser: argparse.ArgumentParser) -> None:
    """Compiles the extension (kernels, and faster calls of patched functions); amp uses it from then on."""
    from ampatch.native import extension_build

    parser.add_argument(
        "--device",
        choices=extension_build.DEVICES,
        default="auto",
        help="cuda: kernels for the CPU and for GPUs; cpu: for the CPU only; auto: for GPUs too if torch sees one and "
        "there is an nvcc",
    )
    parser.add_argument(
        "--arch",
        type=lambda text: text.split(","),
        metavar="LIST",
        help="GPU architectures, such as 80,90 (default: those of this machine's GPUs or, if it has none, "
        f"{','.join(extension_build.DEFAULT_ARCHITECTURES)})",
    )
    parser.add_argument(
        "--output",
        type=_file,
        metavar="DIR",
        help="where to put the library (default: the cache, where amp finds it)",
    )
    parser.add_argument("--force", action="store_true", help="build it even if it is already built")


def _build(arguments: argparse.Namespace) -> int:
    from ampatch.native import extension, extension_build

    output = None if arguments.output is None else Path(arguments.output)
    plan = extension_build.plan(arguments.device, arguments.arch, output)
    if plan.note:
        _print([plan.note])
    gpus = f" and for GPUs of architecture {', '.join(plan.architectures)}" if plan.architectures else ""
    _print([f"Compiler: {plan.compiler.version} ({plan.compiler.command[0]})", f"Kernels:  for the CPU{gpus}"])
    _print([f"Library:  {plan.directory / extension.LIBRARY}"])
    sys.stdout.flush()  # compiling takes a while, and a pipe would hold these lines back until the end
    built = extension_build.carry_out(plan, arguments.force)
    if built.was_cached:
        _print(["It is there already, built from these very sources. `ampatch build --force` builds it again."])
    else:
        _print([f"Built and tried out in {built.seconds:.0f} seconds."])
    found = extension.find()
    if output is None and found is not None and found.path != built.library.path:
        _print([f"amp uses {found.path} instead of this library: it supports more GPUs."])
    if output is None:
        _build_calls(arguments.force)
    return 0


def _build_calls(force: bool) -> None:
    """Builds the extension of calls. It suits this Python and this torch only, so no package can ship it."""
    from ampatch.native import extension, extension_build

    try:
        plan = extension_build.plan_calls()
    except KernelError as error:
        _print([f"Calls of patched functions stay in plain Python: {error}"])
        return
    _print([f"Calls:    {plan.directory / extension.LIBRARY}"])
    sys.stdout.flush()
    built = extension_build.carry_out(plan, force)
    _print(["It is there already." if built.was_cached else f"Built and tried out in {built.seconds:.0f} seconds."])


def _add_half_dtype(parser: argparse.ArgumentParser, help_text: str) -> None:
    from ampatch.half_types import HALF_DTYPES

    parser.add_argument("--half-dtype", type=_half_dtype, metavar=f"{{{','.join(HALF_DTYPES)}}}", help=help_text)


def _add_cast_lists(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cast-lists",
        type=_file,
        action="append",
        default=[],
        metavar="FILE",
        help="a file to lay over ampatch's own lists; may be given several times",
    )


def _add_import(parser: argparse.ArgumentParser, purpose: str = _TO_LOOK_UP) -> None:
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help=f"a module to import first, {purpose}; may be given several times",
    )


def _half_dtype(text: str) -> tuple[torch.dtype]:
    from ampatch.opt_levels import check_half_dtype

    try:
        return (check_half_dtype(text, "the half type"),)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(text: str) -> str:
    # Path would read an empty name as the current folder.
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is empty")
    # The shell does not expand "~" in quotes or after an equals sign.
    return os.path.expanduser(text)  # noqa: PTH111 - Path.expanduser raises for an unknown user


def _print(lines: Iterable[str]) -> None:
    """Prints lines; characters that the terminal's encoding lacks (in a file's name, say) are printed as escapes."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding))


def _print_result(result: Any, arguments: argparse.Namespace) -> None:
    """Prints what a function of the public API returned, as JSON if that was asked for."""
    _print([json.dumps(result.to_dict(), indent=2)] if arguments.json else str(result).splitlines())


#: Subcommands, each with the function that adds its arguments, and the one that runs it.
_Commands = Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int] | None]]

_LISTS: _Commands = {
    "show": (_add_show, _show),
    "check": (_add_check, _check),
    "diff": (_add_diff, _diff),
    "coverage": (_add_coverage, _coverage),
}
_COMMANDS: _Commands = {
    "demo": (_add_demo, _demo),
    "lists": (_add_lists, None),
    "explain": (_add_explain, _explain),
    "doctor": (_add_doctor, _doctor),
    "preflight": (_add_preflight, _preflight),
    "replay": (_add_replay, _replay),
    "tune": (_add_tune, _tune),
    "compare": (_add_compare, _compare),
    "build": (_add_build, _build),
}
