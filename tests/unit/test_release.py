"""`make release`: version, changelog, distributions, commit and tag; and everything that is refused."""

import datetime
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.release import CHANGELOG, INIT, release

ROOT = Path(__file__).resolve().parents[2]
DAY = datetime.date(2026, 1, 31)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@example.com")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


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


def test_what_cannot_be_released_leaves_no_trace(repository: Path) -> None:
    """A version that is not new, a failed build, uncommitted changes."""
    (repository / "setup.py").write_text("raise SystemExit('broken')\n")
    git(repository, "commit", "--quiet", "--all", "--message", "Broken")
    for version, said in (("one", "not a version"), ("0.0.9", "not newer than 0.0.9"), ("0.1.0", "-m build")):
        with pytest.raises(SystemExit, match=said):
            release(repository, version, DAY)
    assert git(repository, "status", "--porcelain") == "" and git(repository, "tag", "--list").split() == ["v0.0.9"]
    (repository / "new.txt").touch()
    with pytest.raises(SystemExit, match="the work tree has changes"):
        release(repository, "0.1.0", DAY)


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
