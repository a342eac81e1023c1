"""The limits of what one request may bring, all in one place; ``docs/api.md`` lists them.

They are chosen by hand, far above what applications send. They make sure that any body is refused
or parsed quickly enough not to delay other requests.
"""

from __future__ import annotations

MAX_BODY_BYTES = 64 * 2**20
"""The most bytes of a body."""

LEAST_PROMPT_BODY_BYTES = 16 * 2**20
"""The smallest limit for bodies that hold only prompts: it is that of windows of up to a million
tokens."""

BYTES_PER_TOKEN = 16
"""The bytes of such a body that are allowed for each token of a window beyond a million tokens."""

MOST_JSON_VALUES = 1_000_000
"""The most values in a body, such as token ids."""

MOST_JSON_NODES = 100_000
"""The most objects, lists and fields of objects in a body, together."""

MOST_MESSAGES = 4096
"""The most messages of a conversation, or items of an input."""

MOST_PARTS = 4096
"""The most parts of the content of a message or of a prompt."""

MOST_DOCUMENTS = 1024
"""The most documents of a conversation."""

MOST_TOOLS = 256
"""The most tools that are offered."""

MOST_CALLS = 256
"""The most calls of tools in one message."""

LONGEST_ARGUMENTS = 256 * 2**10
"""The most characters of the arguments of a call, which are JSON in a text."""

MAX_CHOICES = 128
"""The most answers to one request: prompts times ``n``."""

MOST_STOPS = 16
"""The most texts that end an answer."""

MOST_ENDINGS = 128
"""The most token ids that end an answer, and the most words that it may not have."""

MOST_BIASED = 4096
"""The most tokens with a bias."""

MOST_SCHEMA_CHARACTERS = 512 * 2**10
"""The most characters of a JSON schema, or of those of all tools together."""

MOST_SCHEMA_NODES = 8000
"""The most fields, list entries and objects in it: a compiler of grammars takes quadratic time."""

MOST_GRAMMAR_CHARACTERS = 32 * 2**10
"""The most characters of a grammar in the notation of Lark or GBNF."""

MOST_PATTERN_CHARACTERS = 8 * 2**10
"""The most characters of a regular expression, or of all in one schema."""

MOST_RULES = 500
"""The most rules of a grammar, and the most references in a schema: compilers recurse over them,
and a stack overflow kills the process."""

MOST_EMPTY_LINES = 500
"""The most empty lines of a grammar: a compiler of grammars takes quadratic time over them."""

MOST_GRAMMAR_CHOICES = 1024
"""The most entries of a choice grammar, of which the answer is one."""

MAX_CHUNKS = 10_000
"""The most chunks that one request creates context caches of, and the most pieces into which a text
is split."""

MAX_INPUT_CHARACTERS = 4 * 2**20
"""The most characters of a text that is split at once."""

MOST_EMBEDDED = 2048
"""The most texts that one request embeds."""

MAX_QUERY_CHARACTERS = 10_000
"""The most characters of a query that searches."""

MAX_MESSAGE_CHARACTERS = 500
"""The most characters of an error's message."""
