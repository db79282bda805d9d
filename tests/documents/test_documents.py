"""What the documents say about files: links lead somewhere, named scripts exist, nothing is left out of the lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
DEVELOPMENT = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")

_LINK = re.compile(r"\]\(([^)#]+)\)")
_SCRIPT = re.compile(r"\bscripts[/.](\w+)")
_MEASUREMENT = re.compile(r"\bmeasurements/([\w-]+\.txt)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_refers_to_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = [path.parent / link for link in _LINK.findall(text) if "://" not in link]
    targets += [ROOT / "docs" / "measurements" / name for name in _MEASUREMENT.findall(text)]
    assert [target for target in targets if not target.exists()] == []
    scripts = [ROOT / "scripts" / name for name in _SCRIPT.findall(text) if name != "NAME"]
    assert [script for script in scripts if not script.is_dir() and not script.with_suffix(".py").exists()] == []


def test_the_readme_leads_to_every_document() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {Path(link).name for link in _LINK.findall(readme)}


def test_every_script_is_listed() -> None:
    listed = set(re.findall(r"`(\w+)`", DEVELOPMENT))
    assert {path.stem for path in (ROOT / "scripts").glob("[a-z]*.py")} - listed == set()


def test_every_golden_file_says_how_it_is_made() -> None:
    listed = set(re.findall(r"`([\w./]+)`", DEVELOPMENT))
    assert {path.name for path in (ROOT / "tests" / "data").iterdir()} - listed == set()


def test_every_room_of_the_tests_is_described() -> None:
    listed = set(re.findall(r"`(\w+)`", DEVELOPMENT))
    rooms = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert rooms - listed == set()
