"""Phrases that a native technical writer would not use; each has cost a reader time before it was replaced.

``python .ci/words.py`` checks every text file: documentation, messages, docstrings, comments and names of tests.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = re.compile(r"^(\.ci/words\.py|tests/data/|LICENSE|docs/pictures/)|expected.*\.txt$")
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


def main() -> int:
    """Print every place; return 1 if there are any."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = 0
    for name in listed.split("\0"):
        path = ROOT / name
        if not name or SKIPPED.search(name) or path.suffix not in TEXT or not path.is_file():
            continue
        # Names of tests as words; without line breaks inside comments and docstrings.
        text = re.sub(r"\btest_\w+", lambda test: test[0].replace("_", " "), path.read_text(encoding="utf-8"))
        text = re.sub(r"[ \t]*\n[ \t]*(#(?!#) ?)?", " ", text)
        for phrase, instead in PHRASES.items():
            for match in re.finditer(rf"\b({phrase})\b", text, re.IGNORECASE):
                found += 1
                print(f"{name}: …{text[max(0, match.start() - 40) : match.end() + 40]}… write: {instead}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
