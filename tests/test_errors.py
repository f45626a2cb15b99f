"""The errors: one family, worded to be acted on, and whole on the other side of a pickle."""

from __future__ import annotations

import pickle

import pytest

from ampatch import amp, errors
from ampatch.cast_lists.paths import PathError
from ampatch.errors import AmpError, AmpWarning, CastListError, Fault, did_you_mean

ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
FAULTS = (Fault("own.yaml:2", "unknown list 'a'."), Fault("own.yaml:10", "found 'b'."))


class TestTheFamily:
    @pytest.mark.parametrize("error", ERRORS)
    def test_every_error_is_an_amp_error_and_every_warning_a_user_warning(self, error: type[Exception]) -> None:
        assert issubclass(error, UserWarning if issubclass(error, Warning) else AmpError)

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
    def test_an_error_is_also_what_scripts_catch_already(
        self, error: type[Exception], builtin: type[Exception]
    ) -> None:
        assert issubclass(error, builtin)

    def test_users_reach_each_of_them_through_amp(self) -> None:
        assert {error.__name__ for error in ERRORS} <= set(amp.__all__)
        assert all(getattr(amp, error.__name__) is error for error in ERRORS)


class TestCastListError:
    def test_each_fault_is_a_line_that_begins_with_its_place(self) -> None:
        assert str(CastListError(FAULTS)) == "own.yaml:2: unknown list 'a'.\nown.yaml:10: found 'b'."

    def test_the_faults_can_be_read_one_by_one(self) -> None:
        assert CastListError(iter(FAULTS)).faults == FAULTS

    def test_a_worker_process_can_send_it_home(self) -> None:
        sent = pickle.loads(pickle.dumps(CastListError(FAULTS)))

        assert (sent.faults, str(sent)) == (FAULTS, str(CastListError(FAULTS)))

    @pytest.mark.parametrize("kind", [errors.OptionError, errors.UsageError, AmpWarning, PathError])
    def test_so_can_it_the_others(self, kind: type[Exception]) -> None:
        assert str(pickle.loads(pickle.dumps(kind("what")))) == "what"


class TestDidYouMean:
    def test_one_near_name_is_asked_for(self) -> None:
        assert did_you_mean("whitelsit", ["whitelist", "promote"]) == " Did you mean 'whitelist'?"

    def test_the_nearest_stands_first(self) -> None:
        assert did_you_mean("matmull", ["mul", "chain_matmul", "matmul"]) == (
            " Did you mean 'matmul' or 'chain_matmul' or 'mul'?"
        )

    def test_nothing_is_said_where_nothing_is_near(self) -> None:
        assert did_you_mean("softmax", ["conv2d", "linear"]) == ""

    @pytest.mark.parametrize("name", [None, 1, ["a"]], ids=str)
    def test_a_name_that_is_no_text_is_near_to_nothing(self, name: object) -> None:
        assert did_you_mean(name, ["conv2d"]) == ""
