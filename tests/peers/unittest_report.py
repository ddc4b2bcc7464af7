"""Run one file of unittest cases and write what became of each test, as JSON: FILE REPORT [Class.test ...]

The peers' cases overwrite `TestCase.run` and return nothing from it, so pytest cannot run them.
"""

from __future__ import annotations

import json
import sys
import traceback
import types
import unittest
from pathlib import Path
from typing import Any


class Report(unittest.TestResult):
    """Outcomes by test name: "" for a pass, else why not."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.outcomes[test.id().rpartition(".")[2]] = ""

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self._note(test, err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self._note(test, err)

    def _note(self, test: unittest.TestCase, err: Any) -> None:
        text = "".join(traceback.format_exception_only(err[0], err[1])).strip()
        self.outcomes[test.id().rpartition(".")[2]] = text or "failed"


def main() -> int:
    file, report_file, *names = sys.argv[1:]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    unittest.main = lambda: None  # type: ignore[misc,assignment]  # what its last lines call, after their settings
    exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)
    loader = unittest.TestLoader()
    tests = loader.loadTestsFromNames(names, module) if names else loader.loadTestsFromModule(module)
    report = Report()
    tests.run(report)
    Path(report_file).write_text(json.dumps(report.outcomes))
    return 0 if report.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
