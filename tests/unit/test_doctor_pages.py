"""Every rule of the doctor has a page; what that calls wrong is found, and what it calls right is left alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from paceline.doctor.reading import read
from paceline.doctor.rules import RULES, explain

DOCS = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
FOLDER = Path(read.__code__.co_filename).parents[1] / "pages"
SECTIONS = ["The mistake", "What people see", "Wrong", "Right", "More"]
ONLY_A_RUN_TELLS = {
    "replicas-diverged",  # any cause: the weights themselves must be compared
}


def sections(page: str) -> dict[str, str]:
    parts = re.split(
        r"^## (.+)\n", re.sub(r"^(```.*?^```)", _shielded, page, flags=re.DOTALL | re.MULTILINE), flags=re.M
    )
    return {name: text.replace("\0", "#") for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _shielded(block: re.Match[str]) -> str:
    """A fenced block whose own lines are no headings."""
    return block[1].replace("#", "\0")


def script(page: str, section: str) -> str:
    """The one Python block of a section."""
    found: list[str] = re.findall(r"^```python\n(.*?)^```$", sections(page)[section], re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{section} has {len(found)} scripts"
    return found[0]


def test_each_rule_has_a_page_and_each_page_a_rule() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(RULES)


@pytest.mark.parametrize("name", RULES)
def test_a_page_has_its_sections_in_order_and_none_is_empty(name: str) -> None:
    page = explain(name)
    assert page.startswith(f"# {name}\n\n## The mistake\n")
    found = sections(page)
    assert list(found) == SECTIONS[: len(found)] and len(found) >= 4
    assert all(text.strip() for text in found.values())
    assert [line for line in page.splitlines() if len(line) > 120 and "https://" not in line] == []


@pytest.mark.parametrize("name", RULES)
def test_both_scripts_are_complete_and_no_more_than_alike(name: str) -> None:
    wrong, right = (script(explain(name), section) for section in ("Wrong", "Right"))
    ast.parse(wrong)
    ast.parse(right)
    assert wrong != right


def test_no_two_pages_show_the_same_script() -> None:
    shown = [script(explain(name), section) for name in RULES for section in ("Wrong", "Right")]
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ONLY_A_RUN_TELLS])
def test_what_a_page_calls_wrong_is_found_by_reading(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script(explain(name), "Wrong"), encoding="utf-8")
    assert name in {finding.id for finding in read(path).findings}


@pytest.mark.parametrize("name", RULES)
def test_what_a_page_calls_right_is_left_alone(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script(explain(name), "Right"), encoding="utf-8")
    told = read(path)
    assert told.looked
    assert [finding for finding in told.findings if finding.level != "advice"] == []


def test_the_documentation_lists_the_rules_as_they_are() -> None:
    family, listed = "", []
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"### (\w+)", line):
            family = match[1].lower()
        elif match := re.fullmatch(r"\| `([\w-]+)` \| (error|warning|advice) \| (.+) \|", line):
            listed.append((family, *match.groups()))
    assert listed == [(rule.family, rule.id, rule.severity, rule.title) for rule in RULES.values()]
