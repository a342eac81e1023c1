"""Checks the subjects of the commits that are new: ``scope: imperative verb …``.

New are the commits that are not on ``origin/main``; without that branch, those since the last
release tag, or since this check exists.
"""

from __future__ import annotations

import re
import subprocess
import sys

MOST = 72
"""The most characters of a subject: what ``git log --oneline`` shows in 80 columns."""

FORM = re.compile(r"[\w./, -]+: (?P<verb>[a-z][\w-]*) \S")
OTHER_FORMS = re.compile(r".*(?:[^s]s|ed|ing)")
"""Endings that imperatives seldom have: "fixes", "fixed", "fixing"."""
IMPERATIVES = {"bring", "embed", "feed", "focus", "seed", "speed", "string"}
"""Verbs whose imperative has such an ending."""


def git(*arguments: str) -> str:
    """Return what git prints; nothing where it fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def complaint(subject: str) -> str | None:
    """Return what is wrong with the subject of a commit, or None."""
    if len(subject) > MOST:
        return f"{len(subject)} characters, of at most {MOST}"
    form = FORM.match(subject)
    if form is None:
        return "not of the form 'scope: imperative verb …'"
    verb = form["verb"]
    if verb not in IMPERATIVES and OTHER_FORMS.fullmatch(verb):
        return f"'{verb}' is no imperative"
    return None


def main() -> int:
    """Print each subject that is wrong, and return how many there are."""
    base = (
        git("rev-parse", "--verify", "--quiet", "origin/main")
        or git("describe", "--tags", "--abbrev=0", "--match", "v*")
        or git("log", "--diff-filter=A", "--format=%H", "--", "tools/check_commits.py")
    )
    subjects = git("log", "--no-merges", "--format=%h %s", f"{base}..HEAD") if base else ""
    wrong = 0
    for line in subjects.splitlines():
        commit, _, subject = line.partition(" ")
        if (why := complaint(subject)) is not None:
            wrong += 1
            print(f"{commit}: {subject}\n    {why}")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
