"""A conversation with the model of a server, perhaps about documents."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from httpx_sse import EventSource

from kvlinker.base.errors import ContextLengthError, KVLinkerError
from kvlinker.base.types.texts import SearchHit
from kvlinker.cli.documents.caching import cached_chunks
from kvlinker.cli.documents.library import RemoteLibrary
from kvlinker.cli.documents.plan import Splitting, find_files, named_from_root, plan_ingestion
from kvlinker.cli.documents.progress import show_progress
from kvlinker.cli.documents.search import message_of
from kvlinker.doors.client import Client
from kvlinker.doors.client.calls import stream_chat_completion
from kvlinker.doors.client.clients import TIMEOUT
from kvlinker.doors.client.wire import access_headers, error_of, read_texts, transport_errors

CHUNKS = 4
"""The most chunks of documents that a question gets."""

CANDIDATES = 100
"""The most chunks that are searched for, of which those of other folders are left out."""

CHUNK_TOKENS = 512
"""The most tokens of a chunk, as `kvlinker ingest` has it."""


class Written(NamedTuple):
    """A piece of an answer."""

    text: str
    reasoning: bool
    """True for what the model thinks before it answers."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Describes how an answer was computed."""

    cached: int
    recomputed: int
    prompt: int
    output: int
    ttft: float
    """Seconds to the first token, as they were here."""

    decoding: float
    """Seconds from the first token to the last."""

    def __str__(self) -> str:
        new = self.prompt - self.cached - self.recomputed
        recomputed = f", {self.recomputed:,} recomputed" if self.recomputed else ""
        rate = (
            f", {(self.output - 1) / self.decoding:,.1f} tokens/s"
            if self.output > 1 and self.decoding > 0
            else ""
        )
        return (
            f"prompt {self.prompt:,} tokens: {self.cached:,} cached{recomputed}, {new:,} new;"
            f" first token {self.ttft:.2f} s; answer {self.output:,} tokens{rate}"
        )


class Conversation:
    """Holds the messages, the policy, and the folder of documents; answers come from a server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._api_key = url, api_key
        self._messages: list[dict[str, Any]] = []
        self._folder: Path | None = None
        self.policy: str | None = None
        """The policy of the next answers; None for the server's own."""
        self.figures: Figures | None = None
        """How the last answer was computed; None where it did not come to its end."""
        self.read: list[SearchHit] = []
        """The chunks of documents that the last question got, the best first."""

    def clear(self) -> None:
        """Forget the messages."""
        self._messages.clear()

    def use_documents(self, folder: Path) -> tuple[int, Sequence[str]]:
        """Cache a folder's files, and give the chunks that match best to the questions that follow.
        Returns the number of chunks, and which files have none. Raises KVLinkerError, also where
        there is nothing to read."""
        root = named_from_root(folder.expanduser())
        if not root.exists():
            raise KVLinkerError(f"There is no folder, and no file, at {folder}.")
        files = list(find_files([root], "*"))
        splitting = Splitting("passage", CHUNK_TOKENS)
        with Client(self._url, self._api_key) as client:
            library = RemoteLibrary(client)
            with show_progress() as report:
                plan = plan_ingestion([root], files, library, splitting, report)
            with show_progress() as report:
                chunks = sum(1 for _ in cached_chunks(plan, library, report))
        if not chunks:
            raise KVLinkerError(f"There is no text to read in {folder}.")
        self._folder = root
        return chunks, plan.left_out

    def leave_documents(self) -> None:
        """Ask the questions that follow without documents."""
        self._folder = None

    def ask(self, question: str) -> Iterator[Written]:
        """Yield the answer as it is generated; closing the iterator cancels it.

        The oldest questions and answers are forgotten where the context window has no room for
        them, then the chunks that match least. Raises KVLinkerError.
        """
        self.figures = None
        self.read = self._found(question)
        kept = list(self._messages)
        answer = ""
        try:
            while True:
                content: Any = message_of(self.read, question) if self.read else question
                asked = {"role": "user", "content": content}
                try:
                    # facts are wanted of documents, not variety; else the model's own sampling
                    sampling = {"temperature": 0} if self.read else {}
                    for written in self._stream([*kept, asked], sampling):
                        if not written.reasoning:
                            answer += written.text
                        yield written
                    return
                except ContextLengthError:
                    if kept:
                        del kept[:2]
                    elif self.read:
                        self.read.pop()
                    else:
                        raise
        finally:
            if answer:
                self._messages = [*kept, asked, {"role": "assistant", "content": answer}]

    def _found(self, question: str) -> list[SearchHit]:
        """Return the chunks of the folder that match a question best."""
        if self._folder is None or not re.search(r"\w", question):
            return []
        with Client(self._url, self._api_key) as client:
            hits = client.search(question, limit=CANDIDATES)
        within = [
            hit
            for hit in hits
            if (source := hit.metadata.get("source")) and Path(source).is_relative_to(self._folder)
        ]
        return within[:CHUNKS]

    def _stream(
        self, messages: list[dict[str, Any]], sampling: Mapping[str, Any]
    ) -> Iterator[Written]:
        """Send messages, and yield the answer; note its figures at the end."""
        options = {**sampling, "stream_options": {"include_usage": True}}
        call = stream_chat_completion(messages, self.policy, options)
        address = httpx.URL(self._url)
        asked = time.monotonic()
        first = last = 0.0
        with (
            transport_errors(address),
            httpx.Client(
                base_url=address, headers=access_headers(self._api_key), timeout=TIMEOUT
            ) as http,
            http.stream(**call.request()) as response,
        ):
            if response.is_error:
                response.read()
                raise error_of(response, call.body or {})
            for event in EventSource(response).iter_sse():
                written = [Written(text, False) for text in read_texts(event.data)]
                chunk = {} if event.data == "[DONE]" else json.loads(event.data)
                for choice in chunk.get("choices", ()):
                    if thought := choice["delta"].get("reasoning_content"):
                        written.append(Written(thought, True))
                if written:
                    last = time.monotonic()
                    first = first or last
                yield from written
                if usage := chunk.get("usage"):
                    details = usage["prompt_tokens_details"]
                    self.figures = Figures(
                        cached=details["cached_tokens"],
                        recomputed=details["recomputed_tokens"],
                        prompt=usage["prompt_tokens"],
                        output=usage["completion_tokens"],
                        ttft=(first or time.monotonic()) - asked,
                        decoding=last - first,
                    )
