"""`make release`: version, changelog, distributions, commit and tag; and everything that is refused."""

import datetime
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.release import CHANGELOG, INIT, NotReady, check, dated, main, release, unreleased

ROOT = Path(__file__).resolve().parents[2]
DAY = datetime.date(2026, 1, 31)
TEXT = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2025-12-01\n\n- The first.\n"


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@example.com")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of the tracked files of this checkout, in a repository with one commit and the tag v0.0.9."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "Tester")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "tester@example.com")
    folder = tmp_path / "clone"
    folder.mkdir()
    names = [name for name in git(ROOT, "ls-files", "-z").split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        if name.startswith(("tests/", "docs/")):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Everything")
    git(folder, "tag", "v0.0.9")
    return folder


def test_entries_move_below_the_version() -> None:
    assert unreleased(TEXT) == "### Added\n\n- A thing."
    after = dated(TEXT, "0.2.0", DAY)
    assert unreleased(after) == ""
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-01-31\n\n### Added\n\n- A thing.\n\n## [0.1.0]" in after


@pytest.mark.parametrize(
    "version, message",
    [
        ("one", "'one' is not a version"),
        ("0.0.9", "not newer than 0.0.9, the last release"),
        ("0.0.8", "not newer than 0.0.9, the last release"),
    ],
)
def test_a_version_that_is_not_new_is_refused(repository: Path, version: str, message: str) -> None:
    with pytest.raises(NotReady, match=message):
        check(repository, version)


def test_uncommitted_changes_are_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "new.txt").write_text("")
    assert main(["0.1.0", "--root", str(repository)]) == 1
    assert "not released: the work tree has changes; commit or stash them" in capsys.readouterr().err


def test_a_release_needs_changes(repository: Path) -> None:
    (repository / CHANGELOG).write_text("# Changelog\n\n## [Unreleased]\n\n## [0.0.9] - 2025-01-01\n")
    git(repository, "commit", "--quiet", "--all", "--message", "Nothing new")
    with pytest.raises(NotReady, match="CHANGELOG.md has no entries under"):
        check(repository, "0.1.0")


def test_a_failed_build_leaves_no_trace(repository: Path) -> None:
    (repository / "setup.py").write_text("raise SystemExit('broken')\n")
    git(repository, "commit", "--quiet", "--all", "--message", "Broken")
    with pytest.raises(NotReady, match="-m build"):
        release(repository, "0.1.0", DAY)
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "tag", "--list").split() == ["v0.0.9"]


@pytest.mark.ci
def test_a_release_has_a_version_a_changelog_a_wheel_and_an_sdist(repository: Path) -> None:
    made = release(repository, "7.8.9", DAY)
    assert [path.name for path in made] == [
        "deepspeed_alignment-7.8.9-py3-none-any.whl",
        "deepspeed_alignment-7.8.9.tar.gz",
    ]
    with zipfile.ZipFile(made[0]) as wheel:
        names = set(wheel.namelist())
        assert '__version__ = "7.8.9"' in wheel.read("alignment/__init__.py").decode()
    assert {"alignment/py.typed", "alignment/ds_configs/zero2.json", "alignment/launch/recipes/kto.yaml"} <= names
    assert not any(name.startswith(("tests/", "tools/")) for name in names)
    with tarfile.open(made[1]) as sdist:
        assert "deepspeed_alignment-7.8.9/README.md" in sdist.getnames()
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "tag", "--points-at", "HEAD").strip() == "v7.8.9"
    assert f"## [7.8.9] - {DAY}" in (repository / CHANGELOG).read_text()
    assert '__version__ = "7.8.9"' in (repository / INIT).read_text()
