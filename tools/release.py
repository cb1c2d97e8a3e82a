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


class NotReady(Exception):
    """The repository cannot be released as it is; the message says what to do first."""


def main(arguments: list[str] | None = None) -> int:
    """Make the release and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.release", description="Version, changelog, wheel and sdist."
    )
    parser.add_argument("version", help="the version to release, such as 0.2.0")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        made = release(options.root, options.version, datetime.datetime.now(datetime.timezone.utc).date())
    except NotReady as error:
        print(f"not released: {error}", file=sys.stderr)
        return 1
    files = " ".join(str(path.relative_to(options.root)) for path in made)
    print(f"released {options.version}: {files}\nnext: git push --follow-tags && python -m twine upload {files}")
    return 0


def release(root: Path, version: str, day: datetime.date) -> list[Path]:
    """Release ``version`` from the repository at ``root``.

    Returns:
        The source distribution and the wheel in ``dist/``.

    Raises:
        NotReady: the version is not a new one, the work tree has changes, nothing is unreleased, or a build fails.
            All files are restored.
    """
    check(root, version)
    before = {path: (root / path).read_text(encoding="utf-8") for path in (INIT, CHANGELOG)}
    (root / INIT).write_text(_VERSION_LINE.sub(f'__version__ = "{version}"', before[INIT]), encoding="utf-8")
    (root / CHANGELOG).write_text(dated(before[CHANGELOG], version, day), encoding="utf-8")
    try:
        made = build(root, version)
        _run(root, "git", "commit", "--quiet", "--all", "--message", f"Release {version}")
    except NotReady:
        for path, text in before.items():
            (root / path).write_text(text, encoding="utf-8")
        raise
    _run(root, "git", "tag", "--annotate", f"v{version}", "--message", f"Version {version}")
    return made


def check(root: Path, version: str) -> None:
    """Raise :class:`NotReady` unless ``version`` can be released."""
    try:
        new = Version(version)
    except InvalidVersion:
        raise NotReady(f"{version!r} is not a version (PEP 440), such as 0.2.0") from None
    if _run(root, "git", "status", "--porcelain"):
        raise NotReady("the work tree has changes; commit or stash them")
    tags = _run(root, "git", "tag", "--list", "v*").split()
    newest = max((Version(tag) for tag in tags), default=None)
    if newest is not None and new <= newest:
        raise NotReady(f"{version} is not newer than {newest}, the last release")
    if not unreleased((root / CHANGELOG).read_text(encoding="utf-8")):
        raise NotReady(f"CHANGELOG.md has no entries under {_UNRELEASED!r}")


def unreleased(changelog: str) -> str:
    """The entries below the heading of the next release, without surrounding whitespace."""
    _, _, rest = changelog.partition(f"\n{_UNRELEASED}\n")
    return re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()


def dated(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with its unreleased entries under ``version``, below an empty section for the next release."""
    return changelog.replace(f"\n{_UNRELEASED}\n", f"\n{_UNRELEASED}\n\n## [{version}] - {day.isoformat()}\n", 1)


def build(root: Path, version: str) -> list[Path]:
    """Build and check the distributions of ``version`` in ``dist/``."""
    _run(root, sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".")
    made = sorted((root / "dist").glob(f"deepspeed_alignment-{version}*"))
    if len(made) != 2:
        raise NotReady(f"expected a wheel and a source distribution of {version} in dist/, found {made}")
    _run(root, sys.executable, "-m", "twine", "check", "--strict", *map(str, made))
    return made


def _run(root: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise NotReady(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
