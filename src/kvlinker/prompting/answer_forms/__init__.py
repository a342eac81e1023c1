"""The forms in which models write reasoning and calls of tools: one JSON file for each, found by
the model's chat template. ``form`` enforces one, and ``reader`` reads answers of it.

| field | meaning |
|---|---|
| `models` | which models write so |
| `when` | the texts that are all in their chat templates |
| `turn` | what stands before an answer in a prompt; null if it is not known |
| `reasoning` | `open` and `close` around it, where the chat template has `when` |
| `calls` | the form of calls: see below |

`calls` has `call`, a call with `{name}` and `{arguments}`; `open` and `close` around all calls;
`between` two of them, null if there is only one; and `trigger`, with which calls begin after a
text, null if they are the whole answer.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def answer_forms() -> dict[str, dict[str, Any]]:
    """Return the data of all forms by name; the one with the most texts in ``when`` comes first."""
    found = {
        file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8"))
        for file in files(__name__).iterdir()
        if file.name.endswith(".json")
    }
    return dict(sorted(found.items(), key=lambda entry: (-len(entry[1]["when"]), entry[0])))


def form_for(chat_template: str) -> dict[str, Any]:
    """Return the data of the form of the model that has this chat template."""
    return next(
        form
        for form in answer_forms().values()
        if all(text in chat_template for text in form["when"])
    )
