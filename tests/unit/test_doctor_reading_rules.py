"""Each rule of the static pass, on the snippets in ``tests/doctor_scripts/snippets``: wrong ones in many styles, and
right ones that look like them. A snippet is a file whose first line says what is told of it, ``# expect: RULE`` or
``# expect: clean``; a second line ``# besides: RULE`` allows what its mistake brings along. To add one, add a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.doctor.reading import read
from paceline.doctor.reading.evidence import RULE_CHECKS
from paceline.doctor.rules import RULES

SNIPPETS = Path(__file__).resolve().parents[1] / "doctor_scripts" / "snippets"


def says(path: Path, what: str) -> set[str]:
    """What one of its first lines says."""
    lines = path.read_text(encoding="utf-8").splitlines()[:2]
    told = next((line.partition(":")[2] for line in lines if line.startswith(f"# {what}:")), "")
    return {name.strip() for name in told.split(",") if name.strip()}


EXPECTED = {path: expected for path in sorted(SNIPPETS.rglob("*.py")) if (expected := says(path, "expect"))}


@pytest.mark.parametrize("path", EXPECTED, ids=lambda path: str(path.relative_to(SNIPPETS)))
def test_told_is_what_is_expected(path: Path) -> None:
    findings, expected = read(path).findings, EXPECTED[path] - {"clean"}
    assert expected <= {finding.id for finding in findings}
    loud = [f for f in findings if f.level == "error" or (f.level == "warning" and not expected)]
    assert [(f.id, f.line, f.message) for f in loud if f.id not in expected | says(path, "besides")] == []


def test_every_rule_is_looked_for_and_has_a_wrong_snippet() -> None:
    assert set(RULE_CHECKS) == set(RULES)
    assert set().union(*EXPECTED.values()) - {"clean"} == set(RULE_CHECKS)
