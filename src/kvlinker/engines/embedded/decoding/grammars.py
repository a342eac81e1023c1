"""Guides answers through grammars, by llguidance: tells which tokens may come next.

Masks of tokens are computed in a thread of their own, while the engine's thread runs the model,
or as soon as one is waited for: before, both threads would need Python's lock.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from
from numpy.typing import NDArray

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.threads import compute_serially
from kvlinker.base.types.grammars import AnswerGrammar, json_style
from kvlinker.engines.contract.contract import engine_closed
from kvlinker.engines.contract.grammars import check_enforceable, unenforceable, unfollowable
from kvlinker.engines.embedded.model.loaded import LoadedModel

COMPILED_LIMIT = 32
"""The number of grammars that are kept compiled, for requests that bring the same one again."""

Mask = NDArray[np.bool_] | None
"""The tokens that may come next [vocabulary]; None where the answer is complete."""


class GrammarGuides:
    """Makes guides for the answers of one model, and computes their masks in a thread, one after
    the other: at once, or together with all others of the next step. Any thread may use it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._preparing = threading.Lock()
        self._keeping = threading.Lock()
        self._compiled: OrderedDict[AnswerGrammar, LLMatcher] = OrderedDict()  # last used last
        self._thread = ThreadPoolExecutor(1, "kvlinker-grammar", compute_serially)
        self.postponed: list[tuple[Future[Mask], Callable[[], Mask]]] = []
        """The masks to begin by ``start``. For the engine's thread."""

        self.vocabulary = loaded.vocabulary

    def prepare(self, grammar: AnswerGrammar) -> Callable[[], GrammarGuide]:
        """Compile a grammar, and return what makes a guide for one answer that follows it.

        Raises InvalidRequestError, which names the cause, for a grammar that is invalid or cannot
        be enforced; and EngineClosedError.
        """
        check_enforceable(grammar)
        return partial(GrammarGuide, self, grammar, self._matcher(grammar))

    def submit(self, work: Callable[[], Mask]) -> Future[Mask]:
        """Compute a mask now, in the grammars' thread. Any thread may call it. Raises
        EngineClosedError."""
        try:
            return self._thread.submit(work)
        except RuntimeError:  # it was shut down
            raise engine_closed() from None

    def postpone(self, work: Callable[[], Mask]) -> Future[Mask]:
        """Compute a mask after ``start``. For the engine's thread."""
        future: Future[Mask] = Future()
        self.postponed.append((future, work))
        return future

    def start(self) -> None:
        """Begin the postponed masks, which are wanted after the step that begins. For the engine's
        thread. Raises EngineClosedError."""
        together, self.postponed = self.postponed, []
        try:
            self._thread.submit(_compute, together)
        except RuntimeError:
            raise engine_closed() from None

    def forget(self, grammar: AnswerGrammar, matcher: LLMatcher) -> None:
        """Keep a matcher no longer that has failed: its copies share its lexer, which takes no more
        once it has made too many states for one of them."""
        with self._keeping:
            if self._compiled.get(grammar) is matcher:
                del self._compiled[grammar]

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._thread.shutdown()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance has it, which takes up to a second to make."""
        backend = self._loaded.tokenizer.backend_tokenizer
        size = max(self.vocabulary, 1 + max(backend.get_vocab(with_added_tokens=True).values()))
        return LLTokenizer(
            backend.to_str(), n_vocab=size, eos_token=sorted(self._loaded.eos_token_ids)
        )

    def _matcher(self, grammar: AnswerGrammar) -> LLMatcher:
        """Return the grammar compiled, which is kept for others that bring it."""
        with self._keeping:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                return matcher
        matcher = self._compile(grammar)
        with self._keeping:
            self._compiled[grammar] = matcher
            if len(self._compiled) > COMPILED_LIMIT:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, grammar: AnswerGrammar) -> LLMatcher:
        with self._preparing:
            tokenizer = self._tokenizer
        try:
            if grammar.kind == "json":
                style: Any = json_style()
                compiled = LLMatcher.grammar_from_json_schema(grammar.source, overrides=style)
            else:
                compiled = grammar_from(grammar.kind, grammar.source)
            if grammar.frame:
                compiled = _framed(compiled, grammar.frame)
        except ValueError as error:
            raise unenforceable(grammar, str(error)) from error
        except RecursionError as error:
            raise unenforceable(grammar, "it is nested too deeply") from error
        matcher = LLMatcher(tokenizer, compiled, log_level=0)
        if matcher.is_error():
            raise unenforceable(grammar, matcher.get_error())
        _check_first_mask(matcher, grammar)
        return matcher


def _compute(together: Iterable[tuple[Future[Mask], Callable[[], Mask]]]) -> None:
    for future, work in together:
        try:
            future.set_result(work())
        except BaseException as error:  # which somebody waits for, a panic of llguidance, too
            future.set_exception(error)


class GrammarGuide:
    """Follows one answer through its grammar. Only the engine's thread uses it, once it is made."""

    def __init__(self, guides: GrammarGuides, grammar: AnswerGrammar, compiled: LLMatcher) -> None:
        """``compiled`` is the grammar at its beginning. ``guides`` has the masks computed."""
        self._guides = guides
        self._grammar = grammar
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._next = guides.submit(self._mask)

    def allowed(self) -> Mask:
        """Return the tokens that may come next, as soon as they are known.

        Raises InvalidRequestError where the answer has become too complex for the grammar's parser,
        and KVLinkerError where that panics.
        """
        if not self._next.done():
            self._guides.start()  # it may have been postponed
        try:
            return self._next.result()
        except Exception:
            raise
        except BaseException as error:  # a panic of llguidance, which concerns this answer alone
            raise _panicked(error) from error

    def accept(self, token: int) -> None:
        """Note the token that came, which must be one of those allowed, and have the next mask
        computed together with others of the step."""
        self._next = self._guides.postpone(partial(self._follow, token))

    def completed_by(self, token: int) -> bool:
        """Note the last token, which must be one of those allowed, and return whether the answer
        is complete with it. Raises as ``allowed``."""
        self.accept(token)
        return self.allowed() is None

    def _follow(self, token: int) -> Mask:
        self._matcher.consume_token(token)
        return self._mask()

    def _mask(self) -> Mask:
        mask = b"" if self._matcher.is_stopped() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._guides.forget(self._grammar, self._compiled)
            raise unfollowable(self._grammar, self._matcher.get_error())
        if self._matcher.is_stopped():
            return None
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        return bits[: self._guides.vocabulary].view(np.bool_)


def _panicked(error: BaseException) -> KVLinkerError:
    return KVLinkerError(f"The grammar could not be followed: {type(error).__name__}: {error}")


def _check_first_mask(matcher: LLMatcher, grammar: AnswerGrammar) -> None:
    """Compute the first mask in the caller's thread: it can take seconds, for which all other
    answers with grammars would wait. The lexer, which copies share, remembers it.

    Raises InvalidRequestError where there is none; and KVLinkerError where the parser panics.
    """
    try:
        matcher.compute_bitmask()
        copy = matcher.deep_copy()  # which says what became of the lexer
        copy.compute_bitmask()
    except Exception:
        raise
    except BaseException as error:  # a panic of llguidance
        raise _panicked(error) from error
    if copy.is_error():
        raise unfollowable(grammar, copy.get_error())


def _framed(compiled: str, frame: str) -> str:
    """Put a compiled grammar into a frame, in which it is called ``answer``."""
    is_lark = not compiled.lstrip().startswith("{")
    inner = {"lark_grammar": compiled} if is_lark else json.loads(compiled)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": frame}, {**inner, "name": "answer"}]})
