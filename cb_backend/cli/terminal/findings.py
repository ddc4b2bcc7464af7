"""What a look at the machine finds: one line each, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is empty for what is well."""

    state: str  # OK, WARN or FAIL
    topic: str
    text: str
    remedy: str = ""


Look = Callable[[], Iterable[Finding]]


def look_at(looks: Iterable[tuple[str, Look]]) -> list[Finding]:
    """All findings, in order. A look that fails is a finding itself: the others are wanted all the more then."""
    found: list[Finding] = []
    for topic, look in looks:
        try:
            found += look()
        except Exception as error:  # whatever a broken machine raises
            found.append(Finding(WARN, topic, f"could not be looked at ({type(error).__name__}: {error})"))
    return found


def shown(findings: Iterable[Finding]) -> str:
    """A line a finding; what to do stands below."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:4}  {finding.topic:10}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':18}-> {finding.remedy}")
    return "\n".join(lines)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where anything keeps a server from starting or serving, else 0: warnings are no failure."""
    return int(any(finding.state == FAIL for finding in findings))


def counts(findings: Iterable[Finding]) -> str:
    """ "9 ok, 1 warn, 0 fail"."""
    states = [finding.state for finding in findings]
    return ", ".join(f"{states.count(state)} {state}" for state in (OK, WARN, FAIL))
