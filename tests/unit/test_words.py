"""Phrases that a native technical writer would not use; each has cost a reader time before it was replaced.

The words of every text file are checked: documentation, messages, docstrings, comments and names of tests.
"""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = re.compile(r"^(tests/(unit/test_words\.py|data/)|LICENSE|docs/pictures/)|expected.*\.txt$")
TEXT = {".py", ".md", ".yaml", ".yml", ".sh", ".toml", ".sbatch", ".txt", ".json", ""}

# The phrase as a regular expression, and what to write instead.
PHRASES = {
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again, or reshuffled, resampled",
    r"signs? of life": "heartbeat",
    r"at once": "immediately, or at the same time",
    r"likewise": "say it",
    r"(and|or) the like": "say what",
    r"left aside": "skipped",
    r"(has|have) been typed": "expects a value",
    r"(go|goes|going|went|gone) on": "continue, resume",
    r"(whole|half) checkpoints?": "complete, incomplete",
    r"checkpoints? (is|are|was) whole": "is complete",
    r"stands? beside": "say what it does",
    r"promises?": "target, guarantee",
    r"asked for": "requested",
    r"somebody": "a user, another process",
    r"knows (\d+|only|no) ": "supports",
    r"where there (is|are) (none|one|no)": "if there is none",
    r"by hand": "manually",
    r"the first so many": "the maximum number of",
    r"start (model|policy)": "initial policy",
    r"whoever": "the reader, the process that",
    r"lest": "so that … not",
    r"thereby|thereof|therein|hereby": "say it",
    r"in the stead|in its stead": "instead",
    r"is to be": "must be, or is",
    r"towards(?! Efficient Exact Optimization)": "toward",
    r"\w*(labelled|modelling|signalled|learnt|neighbour|behaviour)\w*": "the American spelling",
    r"\w*(initial|normal|organ|penal|quant|recogn|token)is(ed?|es|ing|ation)\w*": "the American spelling",
}


def words(text: str) -> str:
    """The text with line breaks inside comments and docstrings removed, and names of tests as words."""
    spelled = re.sub(r"\btest_\w+", lambda name: name[0].replace("_", " "), text)
    return re.sub(r"[ \t]*\n[ \t]*(#(?!#) ?)?", " ", spelled)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and not SKIPPED.search(name)]
    return [ROOT / name for name in names if Path(name).suffix in TEXT and (ROOT / name).is_file()]


def test_lines_are_joined() -> None:
    assert words("# the run goes\n    # on") == "# the run goes on"
    assert words("def test_a_run_goes_on() -> None:") == "def test a run goes on() -> None:"


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_not_used(phrase: str) -> None:
    pattern = re.compile(rf"\b({phrase})\b", re.IGNORECASE)
    found = []
    for path in tracked():
        text = words(path.read_text(encoding="utf-8"))
        found += [
            f"{path.relative_to(ROOT)}: …{text[max(0, match.start() - 40) : match.end() + 40]}…"
            for match in pattern.finditer(text)
        ]
    assert not found, f"{len(found)} times; write: {PHRASES[phrase]}\n" + "\n".join(found)
