"""What the files of cast lists hold beside rules: reasons in comments, versions of torch."""

from __future__ import annotations

import textwrap
from pathlib import Path as FilePath

import pytest
from helpers import Write

from ampatch.cast_lists.annotations import Comments, entry_of, shipped_entries, user_entries
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path

pytestmark = pytest.mark.once  # the compiled libraries have no part in it


def reason(text: str) -> str | None:
    """The reason of the entry in the line that holds the word `mm`."""
    text = textwrap.dedent(text)
    (line,) = (number for number, line in enumerate(text.splitlines(), 1) if "mm" in line.partition("#")[0])
    return Comments(text).reason(line)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("torch:\n  # why\n  - mm\n", "why", id="above"),
        pytest.param("torch:\n  # why,\n  # and more\n  - mm\n", "why, and more", id="several-lines"),
        pytest.param("torch:\n  # above\n  - mm  # why\n", "why", id="at-the-end-before-above"),
        pytest.param("torch:\n  # why\n  - addmv\n  - mm\n", "why", id="above-the-group"),
        pytest.param("torch:\n  # why\n  - addmv\n\n  - mm\n", None, id="a-blank-line-ends-the-group"),
        pytest.param("torch:\n  # other\n\n  - mm\n", None, id="not-above-a-blank-line"),
        pytest.param("torch:\n  - addmv  # other\n  - mm\n", None, id="not-at-the-end-of-an-item-before"),
        pytest.param("torch:\n  # why\n  - &group\n    - addmv\n    - mm\n", "why", id="above-the-anchor"),
        pytest.param("torch:\n  - &group\n    # other\n    - addmv\n  - mm\n", None, id="not-inside-an-item-before"),
        pytest.param("torch:\n  - &group\n    - addmv\n    # other\n  - mm\n", None, id="not-deeper-above"),
        pytest.param("torch:\n  # why\n  - [addmv,\n     mm]\n", "why", id="flow-list-over-two-lines"),
        pytest.param("torch:\n  - [addmv,  # other\n     mm]\n", None, id="not-at-the-end-of-the-line-before"),
        pytest.param("torch: [\n  # other\n  addmv,\n  # why\n  mm,\n]\n", "why", id="within-a-flow-list"),
        pytest.param("torch.linalg: [cross]\n# why\ntorch: [mm]\n", "why", id="above-the-namespace"),
        pytest.param("torch: # why\n  - mm\n", "why", id="at-the-end-of-the-namespace"),
        pytest.param("# other\ntorch.linalg: [cross]\ntorch: [mm]\n", None, id="not-above-another-namespace"),
        pytest.param("# header\n\ntorch: [mm]\n", None, id="not-the-header-of-the-file"),
        pytest.param("# file\ntorch: [mm]\n", None, id="not-the-header-without-a-blank-line"),
        pytest.param("# file\n# in two lines\n---\n# list\ntorch:\n  - mm\n", None, id="not-the-header-around-dashes"),
        pytest.param("# file\ntorch:\n  # why\n  - mm\n", "why", id="below-the-header"),
        pytest.param("# file\ntorch: # why\n  - mm\n", "why", id="beside-the-first-key"),
        pytest.param("torch:\n# why\n- addmv\n- mm\n", "why", id="list-as-deep-as-its-key"),
        pytest.param('torch:\n  - {name: mm, instead: "not # this"}\n', None, id="not-in-quotes"),
        pytest.param("torch:\r\n  # why\r\n  - mm\r\n", "why", id="line-ends-of-windows"),
        pytest.param("torch:\n  #\n  - mm\n", None, id="empty-comment"),
        pytest.param("torch:\n  # why\n  - name: mm\n    dtypes: [float16]\n", "why", id="entry-over-two-lines"),
    ],
)
def test_the_reason_is_the_nearest_comment(text: str, found: str | None) -> None:
    assert reason(text) == found


def test_every_shipped_rule_has_an_entry_with_a_reason() -> None:
    by_source = {entry.source: entry for entry in shipped_entries()}
    assert [entry for entry in by_source.values() if not entry.reason] == []
    assert {rule.source for rule in shipped().rules.values()} <= set(by_source)
    for rule in list(shipped().rules.values())[::50]:
        assert entry_of(rule, shipped_entries()) is not None, rule


def test_an_alias_has_the_reason_at_its_anchor() -> None:
    rule = next(rule for (path, _), rule in shipped().rules.items() if path == Path("torch.Tensor", "softmax"))
    entry = entry_of(rule, shipped_entries())
    assert entry is not None
    assert entry.source == rule.source
    assert entry.reason == "Probabilities and their logarithms: a half softmax turns small ones into zero."


class TestUserFiles:
    @pytest.fixture
    def file(self, write: Write) -> FilePath:
        return write('blacklist:\n  "*":\n    # why\n    - {name: matmul, since: "2.0", dtypes: [float16]}\n')

    def test_every_spelling_has_the_reason_of_its_entry(self, file: FilePath) -> None:
        lists = shipped().overlaid(file)
        (entry,) = user_entries(lists)
        assert (entry.reason, entry.since, entry.until, entry.half_dtypes) == ("why", "2.0", None, ("float16",))
        assert entry.covers(Path("torch.Tensor", "__matmul__"))
        assert not entry.covers(Path("torch", "mm"))

    def test_the_comment_at_the_top_of_a_file_is_no_reason(self, write: Write) -> None:
        file = write("# casts.yaml\nblacklist:\n  torch:\n    - mm\n    - bmm\n")
        assert [entry.reason for entry in user_entries(shipped().overlaid(file))] == [None, None]

    @pytest.mark.parametrize("content", [None, "blacklist: [", "blacklist:\n  torch:\n    # of another\n    - mm\n"])
    def test_entries_stay_as_they_were_read_if_the_file_changes(self, content: str | None, file: FilePath) -> None:
        lists = shipped().overlaid(file)
        rule = next(rule for rule in lists.rules.values() if rule.source.startswith(str(file)))
        file.unlink()
        if content is not None:
            file.write_text(content)
        entry = entry_of(rule, user_entries(lists))
        assert entry is not None
        assert entry.reason == "why"

    def test_a_mapping_has_no_entries(self) -> None:
        assert user_entries(shipped().overlaid({"blacklist": {"torch": ["mm"]}})) == []

    def test_an_entry_for_another_torch_is_not_in_force(self, write: Write) -> None:
        file = write('blacklist: {torch: [{name: mm, since: "99.0"}, {name: bmm, until: "99.0"}]}\n')
        assert [entry.is_in_force for entry in user_entries(shipped().overlaid(file))] == [False, True]
