"""The pages say what happens: their blocks, pasted into a fresh repository, do what they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

import fusiongate as fg
from fusiongate import cli
from fusiongate.plugin.options import SETTINGS
from fusiongate.report import reference

from .projects import Project
from .wheels import SOURCE

DOCS = SOURCE / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="needs the source tree")

_BLOCK = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE
)

PAGES = ["index", "gate-a-kernel", "presets", "timings"]
"""The pages with blocks that are run; the others show shell commands of a repository that has GPUs."""


def blocks(page: str) -> Iterator[tuple[str, str | None, str]]:
    for found in _BLOCK.finditer((DOCS / f"{page}.md").read_text(encoding="utf-8")):
        yield found["language"], found["title"], found["text"]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("forked")
def test_every_block_of_python_is_a_file_and_runs(page: str, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written as they are titled; commands run as they stand."""
    monkeypatch.chdir(project.path)
    ran = 0
    for language, title, text in blocks(page):
        if language in ("python", "ini"):
            assert title, f"{page}: a block without a name cannot be pasted"
            written = project.write(title, text)
            if language == "python" and not title.startswith("test_") and "assert" in text:
                exec(compile(text, str(written), "exec"), {"__name__": "__main__"})
                ran += 1
        elif language == "sh":
            for command in text.splitlines():
                program, *arguments = shlex.split(command)
                if program == "pytest":
                    assert project.run(*arguments).ret == pytest.ExitCode.OK, command
                else:
                    assert ("fusiongate", 0) == (program, cli.main(arguments)), command
                ran += 1
    assert ran


def test_a_page_whose_tests_no_command_runs_would_be_seen() -> None:
    """Each file of tests is named by a command, or all of them are run."""
    for page in PAGES:
        shown = list(blocks(page))
        commands = [text for language, _, text in shown if language == "sh"]
        tests = [title for language, title, _ in shown if language == "python" and title and title.startswith("test_")]
        assert bool(commands) is bool(tests), page


def test_the_reference_is_the_codes() -> None:
    written = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert reference.page() == written, "run python -m fusiongate.report.reference docs/reference.md"


def test_the_reference_names_everything_public() -> None:
    page = reference.page()
    missing = [name for name in fg.__all__ if name != "kernels" and f"::: fusiongate.{name}\n" not in page]
    missing += [name for name, *_ in SETTINGS if f"`--fusiongate-{name}" not in page]
    assert [] == missing


def test_every_page_is_in_the_navigation() -> None:
    listed = set(
        re.findall(r"^  - .*: (\S+\.md)$", (DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {path.name for path in DOCS.glob("*.md")} == listed


def test_links_between_pages_lead_somewhere() -> None:
    for path in [*DOCS.glob("*.md"), SOURCE / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
