"""Long runs that were stopped go on, with what was found for the same code only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kept_results import append_entry, fingerprint, read_entries
from tests.mutation.journal import Journal
from tests.mutation.mutate import Mutant

MUTANT = Mutant(3, 10, "a < b", "a < b -> a <= b")


def test_an_outcome_counts_for_its_code_and_tests_only(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path).note("scheduler", MUTANT, "code", "tests", "noticed")
    journal = Journal(path)
    assert journal.outcome("scheduler", MUTANT, "code", "tests") == "noticed"
    assert journal.outcome("scheduler", MUTANT, "code", "others") is None
    assert journal.outcome("scheduler", MUTANT, "code", "others", keep="noticed") == "noticed"
    assert journal.outcome("scheduler", MUTANT, "changed", "tests", keep="noticed") is None
    assert journal.outcome("admission", MUTANT, "code", "tests") is None
    Journal(path).note("scheduler", MUTANT, "code", "tests", "survived")
    assert Journal(path).outcome("scheduler", MUTANT, "code", "tests", keep="noticed") == "survived"


def test_a_line_that_was_cut_short_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    append_entry(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2')
    assert read_entries(path) == [{"a": 1}]
    append_entry(path, {"a": 3})
    assert read_entries(path) == [{"a": 1}, {"a": 3}]


def test_another_file_is_refused_by_name_and_line(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text('{"a": 1}\nsome text\n')
    with pytest.raises(ValueError, match="notes, line 2"):
        read_entries(path)


def test_a_fingerprint_changes_with_text_and_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("x")
    first = fingerprint([one])
    two.write_text("x")
    assert fingerprint([two]) != first
    one.write_text("y")
    assert fingerprint([one]) != first
