"""The doctor before the official cases: small scripts of which line 1 says what is to be found, ``# expect: id``.

They are kept beside the project, in ``shared/doctor_cases``: where they are not, nothing can be said of them.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.doctor.examine import Limits, examine
from paceline.doctor.findings import Finding
from paceline.doctor.rules import RULES

CASES = Path(__file__).resolve().parents[3] / "shared" / "doctor_cases"
RUN = {"37_rank0-only-collective_bad"}
"""Those that are run, too, each time: one that hangs; the others with ``--long``. Mistakes in data, gradients, files,
and a right script, are run in `test_doctor_scripts`."""
PATIENCE_S = 60.0
"""The longest that a case takes, on a busy machine too, with the hangs among them."""

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"the cases are not there: {CASES}")

NAMES = sorted(path.stem for path in CASES.glob("*.py"))


def expected(name: str) -> str | None:
    """The rule that is broken; ``None``: none is."""
    said = (CASES / f"{name}.py").read_text(encoding="utf-8").splitlines()[0].removeprefix("# expect: ")
    return None if said == "clean" else said


def judged(name: str, limits: Limits | None = None) -> list[Finding]:
    """What was found that counts: of a right script all that is more than advice, of a wrong one what is expected."""
    told = examine(CASES / f"{name}.py", limits=limits)
    assert told.looked
    wanted = expected(name)
    return [f for f in told.findings if (f.id == wanted if wanted else f.level != "advice")]


def test_each_case_says_what_is_to_be_found() -> None:
    assert len(NAMES) == 77
    assert set(NAMES) >= RUN
    for name in NAMES:
        assert (expected(name) is None) == name.endswith("_good")
        assert expected(name) in {None, *RULES}


@pytest.mark.parametrize("name", NAMES)
def test_reading_judges_each_case_as_it_should(name: str) -> None:
    found = judged(name)
    assert bool(found) == (expected(name) is not None), found


@pytest.mark.parametrize(
    "name", [name if name in RUN else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_running_judges_each_case_as_it_should(name: str) -> None:
    began_s = time.monotonic()
    found = judged(name, Limits(timeout_s=PATIENCE_S))
    assert bool(found) == (expected(name) is not None), found
    assert time.monotonic() - began_s < PATIENCE_S
