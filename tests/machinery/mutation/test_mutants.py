"""Tests mutants: each is one change of one function, by a name that stays when the function moves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants import all_mutants, drawn, instrument
from run import Covering, in_order

SOURCE = '''
"""A module."""


class Counter:
    def note(self, value, limit=3):
        """Says whether it is the last."""
        if value == limit and not self.done:
            self.total += 1
            self.tell(value)
        return [each for each in self.values if each < limit]


def shared():
    return 1


def alone():
    def inner():
        return shared() - 1

    return inner
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "ampatch" / "weights").mkdir(parents=True)
    (tmp_path / "ampatch" / "weights" / "counter.py").write_text(SOURCE)
    (tmp_path / "ampatch" / "other.py").write_text("def shared():\n    return 2\n")
    (tmp_path / "ampatch" / "cli.py").write_text("def command():\n    return 3\n")
    return tmp_path


def test_names_of_mutants_have_function_operator_and_number(checkout):
    assert sorted(all_mutants(checkout)) == [
        "Counter.note:arithmetic:1",
        "Counter.note:boolean:1",
        "Counter.note:compare:1",
        "Counter.note:compare:2",
        "Counter.note:condition:1",
        "Counter.note:constant:1",
        "Counter.note:return:1",
        "Counter.note:statement:1",
        "alone:arithmetic:1",
        "alone:constant:1",
        "alone:return:1",
        "alone:return:2",
    ]


def test_mutant_is_one_change_that_compiles(checkout):
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in all_mutants(checkout).values():
        changed = mutant.source().splitlines()
        compile(mutant.source(), "changed", "exec")
        assert [mine == other for mine, other in zip(plain, changed, strict=True)].count(False) == 1, mutant.name


def test_mutants_keep_their_names_if_the_function_moves(checkout):
    before = set(all_mutants(checkout))
    (checkout / "ampatch" / "weights" / "counter.py").rename(checkout / "ampatch" / "moved.py")
    assert set(all_mutants(checkout)) == before


def test_same_mutants_are_drawn_whatever_else_there_is():
    names = [f"function{number}:constant:{count}" for number in range(50) for count in (1, 2)]
    some = drawn(names, 10, seed=1)
    assert len({name.partition(":")[0] for name in some}) == 10
    assert drawn(list(reversed(names)), 10, seed=1) == some
    assert drawn(names, 10, seed=2) != some
    gone = some[3]
    assert drawn([name for name in names if name != gone], 9, seed=1)[:3] == some[:3]


def test_instrumented_function_notes_its_name_and_returns_the_same():
    entered: list[str] = []
    namespace: dict[str, object] = {"_entered_": entered.append}
    exec(instrument(SOURCE), namespace)
    inner = namespace["alone"]()  # type: ignore[operator]
    assert inner() == 0
    assert entered == ["alone", "shared"]


def test_tests_of_a_mutant_run_in_turns_the_narrowest_first():
    def covering(test: str, breadth: int) -> Covering:
        return Covering(test, 1.0, breadth)

    tests = [covering("wide[1]", 90), covering("wide[2]", 90), covering("narrow[1]", 3), covering("narrow[2]", 5)]
    order = in_order(tests, budget=3.0)
    assert [test.partition("[")[0] for test in order] == ["narrow", "wide", "narrow"]
