"""Tests the errors: their bases, their texts, and that they can be pickled."""

from __future__ import annotations

import pickle

import pytest

from ampatch import amp, errors
from ampatch.cast_lists.paths import PathError
from ampatch.errors import AmpError, AmpWarning, CastListError, Fault, did_you_mean

ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
FAULTS = (Fault("own.yaml:2", "unknown list 'a'."), Fault("own.yaml:10", "found 'b'."))


@pytest.mark.parametrize("error", ERRORS)
def test_error_is_public_and_an_amp_error_or_a_user_warning(error):
    assert issubclass(error, UserWarning if issubclass(error, Warning) else AmpError)
    assert error.__name__ in amp.__all__
    assert getattr(amp, error.__name__) is error


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.OptionError, ValueError),
        (errors.UsageError, RuntimeError),
        (errors.BannedFunctionError, NotImplementedError),
        (errors.LossScaleError, RuntimeError),
        (errors.IntegrationError, ImportError),
        (errors.KernelError, RuntimeError),
        (errors.CastListError, ValueError),
        (PathError, AmpError),
    ],
)
def test_error_is_also_the_builtin_one_that_scripts_catch(error, builtin):
    assert issubclass(error, builtin)


def test_cast_list_error_has_a_line_for_each_fault_and_can_be_pickled():
    error = CastListError(iter(FAULTS))
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == "own.yaml:2: unknown list 'a'.\nown.yaml:10: found 'b'."
        assert each.faults == FAULTS


@pytest.mark.parametrize("kind", [errors.OptionError, errors.UsageError, AmpWarning, PathError])
def test_error_can_be_pickled(kind):
    assert str(pickle.loads(pickle.dumps(kind("what")))) == "what"


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("whitelsit", ["whitelist", "promote"], " Did you mean 'whitelist'?"),
        ("matmull", ["mul", "chain_matmul", "matmul"], " Did you mean 'matmul' or 'chain_matmul' or 'mul'?"),
        ("softmax", ["conv2d", "linear"], ""),
        (None, ["conv2d"], ""),
        (1, ["conv2d"], ""),
        (["a"], ["conv2d"], ""),
    ],
    ids=str,
)
def test_did_you_mean_names_similar_names_the_nearest_first(name, known, expected):
    assert did_you_mean(name, known) == expected
