"""One release: ``python -m tools.release 0.2.0`` (``make release VERSION=0.2.0``).

It writes the version and the date into ``alignment/__init__.py`` and ``CHANGELOG.md``, builds and checks the source
distribution and the wheel, then commits and tags. It uploads nothing; its last line says how.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
INIT = Path("alignment") / "__init__.py"
CHANGELOG = Path("CHANGELOG.md")
_VERSION_LINE = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
_UNRELEASED = "## [Unreleased]"


def main(arguments: list[str] | None = None) -> None:
    """Make the release, or exit with what to do first."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="the version to release, such as 0.2.0")
    version = parser.parse_args(arguments).version
    made = release(ROOT, version, datetime.datetime.now(datetime.timezone.utc).date())
    files = " ".join(str(path.relative_to(ROOT)) for path in made)
    print(f"released {version}: {files}\nnext: git push --follow-tags && python -m twine upload {files}")


def release(root: Path, version: str, day: datetime.date) -> list[Path]:
    """Release ``version`` from the repository at ``root``; return the source distribution and the wheel.

    Raises SystemExit with what to do first if it cannot be released. If a build fails, all files are restored.
    """
    try:
        new = Version(version)
    except InvalidVersion:
        raise SystemExit(f"not released: {version!r} is not a version (PEP 440), such as 0.2.0") from None
    if _run(root, "git", "status", "--porcelain"):
        raise SystemExit("not released: the work tree has changes; commit or stash them")
    newest = max(map(Version, _run(root, "git", "tag", "--list", "v*").split()), default=None)
    if newest is not None and new <= newest:
        raise SystemExit(f"not released: {version} is not newer than {newest}, the last release")
    changelog = (root / CHANGELOG).read_text(encoding="utf-8")
    if not re.search(rf"\n{re.escape(_UNRELEASED)}\n+(?!## |\n|$)", changelog):
        raise SystemExit(f"not released: CHANGELOG.md has no entries under {_UNRELEASED!r}")
    dated = f"\n{_UNRELEASED}\n\n## [{version}] - {day.isoformat()}\n"
    (root / CHANGELOG).write_text(changelog.replace(f"\n{_UNRELEASED}\n", dated, 1), encoding="utf-8")
    init = (root / INIT).read_text(encoding="utf-8")
    (root / INIT).write_text(_VERSION_LINE.sub(f'__version__ = "{version}"', init), encoding="utf-8")
    try:
        _run(root, sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".")
        made = sorted((root / "dist").glob(f"deepspeed_alignment-{version}*"))
        _run(root, sys.executable, "-m", "twine", "check", "--strict", *map(str, made))
        _run(root, "git", "commit", "--quiet", "--all", "--message", f"Release {version}")
    except SystemExit:
        _run(root, "git", "checkout", "--quiet", "--", ".")
        raise
    _run(root, "git", "tag", "--annotate", f"v{version}", "--message", f"Version {version}")
    return made


def _run(root: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"not released: `{' '.join(command)}` failed:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout.strip()


if __name__ == "__main__":
    main()
