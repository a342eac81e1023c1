"""Engines over tiny models, and the requests and oracles that tests hold against them."""

from __future__ import annotations

import queue
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from kvlinker.base.events import Events
from kvlinker.base.types.answers import Delta
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import Failed, Finished, GenerationRequest
from kvlinker.engines.embedded.attention.kernels import native_attention
from kvlinker.engines.embedded.attention.position_scores import native_dots
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.engines.embedded.execution.compiled.compiled_step import step_function
from kvlinker.engines.embedded.kv_cache.prefixes import LEAST_TOKENS
from kvlinker.engines.embedded.model.interception import attention_of
from kvlinker.engines.embedded.model.norms import native_norm
from kvlinker.engines.embedded.model.states.delta_rule import rule_like
from kvlinker.engines.embedded.model.weights.native_products import native_products
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt, Segment
from kvlinker.settings import load_settings
from kvlinker.store import ChunkStore, HostTier
from tests.clocks import ManualClock
from tests.engines.embedded.held import Held
from tests.toy_models import VOCABULARY, loaded_model
from tests.waiting import PATIENCE, wait_until

EVERY_POLICY = [
    "full",
    "naive",
    "naive-unpositioned",
    "prefix",
    "set-prefix",
    "legolink-4",
    "attnlink-5",
    "random-30",
    "h2o-30",
    "cacheblend-20",
    "cacheblend-20-onestep-v",
    "cacheblend-auto",
    "cachecraft-0.7",
    "cachecraft-1-focus-w1",
    "query-10",
    "random-10+h2o-10",
    "query-10+legolink-2",
    "cacheblend-20+legolink-2",
    "query-10+cacheblend-20+cachecraft-1-focus-w1",
]
"""Every family, and unions of every kind: static, probing, refining, and all at once."""


@dataclass
class Outcome:
    """What a request's sink received."""

    events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    deltas: list = field(default_factory=list)
    finished: Finished | None = None
    failed: Failed | None = None

    def wait(self, timeout=PATIENCE):
        while self.finished is None and self.failed is None:
            self.note(self.events.get(timeout=timeout))
        return self

    def wait_for_token(self, timeout=PATIENCE):
        self.note(self.events.get(timeout=timeout))
        return self

    def note(self, event):
        if isinstance(event, Delta):
            self.deltas.append(event)
        elif isinstance(event, Finished):
            self.finished = event
        else:
            self.failed = event

    def put(self, choice, event):
        """The request's sink, where it asks for one choice."""
        assert choice == 0
        self.events.put(event)

    @property
    def tokens(self):
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self):
        return [entry.logprob for delta in self.deltas for entry in delta.logprobs]

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)


class Bench:
    """One engine over a tiny model with a store of its own."""

    def __init__(
        self,
        family="llama",
        changes=None,
        slower=None,
        device=None,
        memory=1 << 28,
        model=None,
        **options,
    ):
        """``changes``: to the model's configuration; ``model``: a loaded one in its place.
        ``slower``: makes tiers behind the host's, given the events; ``device``: one before it.
        ``memory``: the host's budget. ``options``: settings. Nothing comes too late from slower
        tiers unless ``clock`` is put forward."""
        self.loaded = model or loaded_model(family, **(changes or {}))
        self.events = Events()
        self.slower = slower(self.events) if slower else []
        device = device(self.events) if device else None
        self.clock = ManualClock()
        self.store = ChunkStore(
            [HostTier(memory, self.events), *self.slower],
            self.events,
            device=device,
            clock=self.clock,
        )
        settings = load_settings(
            **({"kv_slots": 4096, "max_step_tokens": 64, "prefix_cache": "off"} | options)
        )
        self.engine = EmbeddedEngine(
            self.loaded, store=self.store, events=self.events, settings=settings
        )

    def submit(
        self,
        prompt,
        policy="legolink-4",
        tenant="default",
        sink=None,
        explains=False,
        keeps=False,
        **sampling,
    ):
        outcome = Outcome()
        params = SamplingParams(
            **({"temperature": 0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True} | sampling)
        )
        request = GenerationRequest(
            prompt,
            as_policy(policy),
            params,
            tenant,
            explains=explains,
            shows_attention=explains,
            keeps_answer=keeps,
        )
        handle = self.engine.generate(request, sink or outcome.put)
        return outcome, handle

    def submit_choices(self, prompt, n, policy="legolink-4", **sampling):
        """An outcome for each choice, and the handle of them all."""
        outcomes = [Outcome() for _ in range(n)]
        params = SamplingParams(
            **({"temperature": 0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True} | sampling)
        )
        request = GenerationRequest(prompt, as_policy(policy), params, n=n)
        handle = self.engine.generate(
            request, lambda choice, event: outcomes[choice].events.put(event)
        )
        return outcomes, handle

    def answer(self, prompt, policy="legolink-4", **sampling):
        return self.submit(prompt, policy, **sampling)[0].wait()

    def answer_twice(self, prompt, policy="legolink-4", **sampling):
        """The answer, and then that with the cache warm, in which all but the last token is reused
        as it was linked, or the chunk that it ends in. Yields both, for an engine that keeps
        prefixes."""
        yield self.answer(prompt, policy, **sampling)
        again = self.answer(prompt, policy, **sampling)
        yield again
        ends_fresh = all(span.end < len(prompt) for span in prompt.spans)
        if ends_fresh and len(prompt) > LEAST_TOKENS and not as_policy(policy).needs.refines:
            assert again.finished.usage.exact_cached_tokens == len(prompt) - 1

    def explain(self, prompt, policy, tenant="default", attention=False):
        """What a request for one token would do, and why."""
        request = replace(request_for(prompt, policy, tenant), shows_attention=attention)
        return self.engine.explain(request).result(timeout=PATIENCE)

    def cache(self, prompt, tenant="default"):
        for future in [self.engine.cache_chunk(chunk, tenant=tenant) for chunk in prompt.chunks]:
            future.result(timeout=PATIENCE)

    def held(self):
        """Holds the engine before its next step, while this context lasts."""
        return Held(self.engine)

    def settle(self):
        """Wait until the engine is idle, and check that it has freed everything."""
        wait_until(lambda: self.engine.scheduler.idle)
        self.engine.scheduler.check_integrity()
        load = self.engine.current_load()
        assert (load.running, load.waiting, load.slots_used) == (0, 0, 0)

    def close(self):
        if self.engine.healthy:
            self.settle()
        self.engine.close()
        self.store.close()


def as_policy(policy):
    return parse_policy(policy) if isinstance(policy, str) else policy


def request_for(prompt, policy, tenant="default"):
    """A request for one token."""
    return GenerationRequest(prompt, as_policy(policy), SamplingParams(max_tokens=1), tenant)


@pytest.fixture(scope="module")
def without_amx():
    """The CPU passes for one without AMX, where native code does all that it can."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield


@pytest.fixture
def native_anew():
    """Forget before and after the test what native code was loaded and checked, or found
    missing."""
    loaders = (
        native_attention,
        native_dots,
        native_products,
        native_norm,
        rule_like,
        step_function,
    )
    for loader in loaders:
        loader.cache_clear()
    yield
    for loader in loaders:
        loader.cache_clear()


@pytest.fixture
def bench():
    """Makes engines, and checks at the end of the test that each has freed everything."""
    with ExitStack() as stack:

        def make(family="llama", changes=None, **options):
            made = Bench(family, changes, **options)
            stack.callback(made.close)
            return made

        yield make


def random_tokens(count, seed):
    return tuple(np.random.default_rng(seed).integers(3, 256, count).tolist())


def linked_prompt(*chunk_lengths, header=0, fresh=11, seed=0, middle=0):
    """A prompt of unaligned chunks, with fresh tokens before, between and behind them."""
    segments: list[Segment] = [FreshSegment(random_tokens(header, seed))]
    for index, length in enumerate(chunk_lengths):
        segments.append(CachedSegment(Chunk(random_tokens(length, [seed, index]))))
        segments.append(FreshSegment(random_tokens(middle, [seed, index, 1])))
    segments.append(FreshSegment(random_tokens(fresh, [seed, 99])))
    return Prompt(tuple(segments))


@torch.inference_mode()
def last_attention(family, prompt):
    """The last token's attention by the model's own forward pass over the whole text: [layers,
    length], mean over heads."""
    loaded = loaded_model(family)
    with attention_of(loaded.model, "eager"):
        ids = torch.from_numpy(prompt.tokens)[None]
        found = loaded.model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    return torch.stack([weights[0, :, -1].mean(0) for weights in found]).numpy()


@torch.inference_mode()
def full_forward(family, prompt, steps):
    """Greedy tokens and their log probabilities by the model's own forward pass over the whole text
    each time."""
    loaded = loaded_model(family)
    ids = list(prompt.tokens)
    tokens, logprobs = [], []
    with attention_of(loaded.model, "eager"):
        for _ in range(steps):
            logits = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            token = int(logits.argmax())
            tokens.append(token)
            logprobs.append(float(torch.log_softmax(logits.float(), -1)[token]))
            ids.append(token)
    assert max(tokens) < VOCABULARY
    return tokens, logprobs
