"""Links of every Markdown page lead somewhere, and every page of docs/ can be found. No network."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {".venv", "build", "dist", "results", "node_modules"}
CODE = {".py", ".sh", ".toml", ".cfg", ".service", ".env", ".example", ".sbatch", ""}
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(\s*<?([^()\s<>]+)>?(?:\s+\"[^\"]*\")?\s*\)|<img[^>]*\ssrc=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


def pages(root):
    """Every Markdown file of a checkout."""
    return sorted(path for path in root.rglob("*.md")
                  if not any(part in SKIPPED or part.startswith(".")
                             for part in path.relative_to(root).parts))


@functools.cache
def prose(path):
    return _FENCE.sub("", path.read_text())


def links(path):
    """Targets of links and images, in order; code is not looked at."""
    return [one or other for one, other in _LINK.findall(_INLINE.sub("", prose(path)))]


@functools.cache
def anchors(path):
    """What `#...` may name in a page, as forges make it of headings."""
    found = set(_ANCHOR.findall(prose(path)))
    count = {}
    for heading in _HEADING.findall(prose(path)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        seen = count[slug] = count.get(slug, -1) + 1
        found.add(f"{slug}-{seen}" if seen else slug)
    return found


def is_external(target):
    return re.match(r"[a-z][a-z+.-]*:", target) is not None


def target_of(path, link):
    """The file that a relative link of a page leads to."""
    name = link.partition("#")[0]
    return (path.parent / name).resolve() if name else path


def broken(root):
    """`page: link` for each relative link that leads nowhere."""
    found = []
    for path in pages(root):
        for link in links(path):
            if is_external(link):
                continue
            target, anchor = target_of(path, link), link.partition("#")[2]
            inside = target.is_relative_to(root) and target.exists()
            if not inside or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                found.append(f"{path.relative_to(root)}: {link}")
    return found


def test_no_link_is_broken():
    assert len(pages(ROOT)) > 25
    assert broken(ROOT) == []


def test_the_index_names_every_page_once():
    index = ROOT / "docs" / "index.md"
    named = [target_of(index, link) for link in links(index)]
    assert len(named) == len(set(named))
    assert set((ROOT / "docs").rglob("*.md")) - {index} <= set(named)


def test_the_readme_leads_to_the_index():
    assert ROOT / "docs" / "index.md" in [target_of(ROOT / "README.md", link)
                                          for link in links(ROOT / "README.md")]


def test_the_readme_begins_with_the_two_commands_that_set_all_up():
    """One for the main job and one for the tests, which CI calls."""
    commands = [line.split("#")[0].strip() for line in (ROOT / "README.md").read_text().splitlines()
                if line.startswith("    ./launch/")]
    assert commands[:2] == ["./launch/demo", "./launch/test"]
    assert "exec ./launch/test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))],
                         ids=lambda path: path.name)
def test_pages_are_linked_rather_than_named(path):
    assert re.findall(r"`(?:docs/)?[\w/-]+\.md`", prose(path)) == []


def sources():
    for folder in ("pipeinfer", "benchmarks", "tests", "launch", "hostfiles"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in CODE and not SKIPPED & set(path.parts) \
                    and path != Path(__file__).resolve():
                yield path


def test_pages_and_sections_that_the_code_names_are_there():
    numbers = set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ",
                             (ROOT / "docs" / "algorithms.md").read_text(), re.MULTILINE))
    named = 0
    for path in sources():
        text = path.read_text(errors="replace")
        for page in re.findall(r"docs/[\w/-]+\.md", text):
            assert (ROOT / page).exists(), (path, page)
        cited = re.findall(r"docs/algorithms\.md\s+((?:\d+(?:\.\d+)?(?:, )?)+)", text)
        for number in (n for group in cited for n in re.findall(r"\d+(?:\.\d+)?", group)):
            named += 1
            assert number in numbers, (path, number)
    assert named > 20


@pytest.mark.parametrize(("text", "wrong"), [
    ("[a](other.md)", []),
    ("[a](other.md#a-heading) and [b](#here)\n\n## Here", []),
    ("![a](picture.png)", ["page.md: picture.png"]),
    ("[a](missing.md)", ["page.md: missing.md"]),
    ("[a](other.md#no-heading)", ["page.md: other.md#no-heading"]),
    ("[a](../outside.md)", ["page.md: ../outside.md"]),
    ("[![badge](badge.svg)](other.md)", ["page.md: badge.svg"]),
    ('<img width="9" src="logo.png">', ["page.md: logo.png"]),
    ("`[a](missing.md)` and\n```\n[a](missing.md)\n```\n", []),
    ("[a](https://example.org/missing.md)", []),
    ("[a](other.md#twice-1) [b](other.md#the-options) [c](other.md#made-here)", []),
])
def test_a_broken_link_is_noticed(tmp_path, text, wrong):
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "other.md").write_text("# A heading\n\n## Twice\n\n## Twice\n\n"
                                       "### The `options`\n\n<a id=\"made-here\"></a>\n")
    assert broken(tmp_path.resolve()) == wrong
