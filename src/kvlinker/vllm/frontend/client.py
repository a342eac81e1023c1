"""Wraps vLLM's asynchronous engine for the rest of the frontend: token ids in, new tokens out."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kvlinker.config import Settings
from kvlinker.errors import InvalidRequestError, KVLinkerError, ModelLoadError
from kvlinker.types.grammars import AnswerGrammar
from kvlinker.types.sampling import SamplingParams
from kvlinker.vllm.options import ConnectorOptions
from kvlinker.vllm.plugin import NAME
from kvlinker.vllm.protocol.signature import PlanSigner
from kvlinker.vllm.protocol.transfer_plan import PARAM, TransferOutcome, TransferPlan

T = TypeVar("T")

MOST_LOGPROBS = 1000
CPU_MEMORY_SHARE = 0.4
"""The share of all memory that vLLM may take without a GPU; its default, 0.92, is more than most machines have free."""

SPARE_TOKENS = 2
"""The tokens of vLLM's window that capturing leaves free: one behind the captured ones, and an answer of one token."""

IDLE_SECONDS = 0.01
"""The seconds between two looks at whether vLLM has nothing to do."""

_ONE_TOKEN = SamplingParams(temperature=0, ignore_eos=True)

RESERVED_OPTIONS = ("model", "tokenizer", "dtype", "kv_transfer_config")


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens that vLLM generated since the last report."""

    token_ids: tuple[int, ...]

    logprobs: Sequence[Mapping[int, float]] | None
    """One entry per token, {token id: log probability}; None where none were asked for."""

    reason: str | None
    """The reason why these are the last tokens: ``stop``, ``length``, ``abort`` or ``error``; None if more follow."""

    outcome: TransferOutcome | None
    """The outcome of the request's transfer plan, with the last tokens; None where it had none."""


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """The numbers of tokens that fit into vLLM: into its KV cache, and into one prompt and answer together."""

    slots: int
    max_model_len: int


class VLLMClient:
    """One of vLLM's engine clients and its event loop. Methods may be called from any thread."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop, signer: PlanSigner) -> None:
        """Wrap ``client``. ``signer`` is the signer of the state directory that vLLM's connector was given."""
        self._client = client
        self.loop = loop
        self._signer = signer

    @property
    def healthy(self) -> bool:
        """True while vLLM's engine serves."""
        return not self._client.errored

    @property
    def capacity(self) -> KVCapacity:
        """The numbers of tokens that fit into vLLM."""
        cache, model = self._client.vllm_config.cache_config, self._client.vllm_config.model_config
        return KVCapacity((cache.num_gpu_blocks or 0) * cache.block_size, model.max_model_len)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` in the client's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def stream(
        self,
        name: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        transfer: TransferPlan | None = None,
        salt: str | None = None,
    ) -> AsyncGenerator[NewTokens, None]:
        """Yield what the request ``name`` generates, as it comes. Closing the iterator aborts the request."""
        prompt = {"prompt_token_ids": list(tokens)} | ({} if salt is None else {"cache_salt": salt})
        transfer_params = None if transfer is None else self._signer.params(transfer, tokens)
        params = _vllm_sampling(sampling, max_tokens, transfer_params)
        outputs = self._client.generate(prompt, params, name)
        try:
            async for output in outputs:
                yield _new_tokens(output)
        finally:
            await outputs.aclose()  # which aborts what is under way

    async def run_transfer(
        self, transfer: TransferPlan, tokens: Sequence[int], *, salt: str | None = None
    ) -> TransferOutcome:
        """Carry out a transfer plan over ``tokens`` [linked] and return its outcome. The answer is discarded. No other
        request reuses its KV, unless it is given this ``salt``."""
        behind = (*tokens, 0)  # vLLM computes the last token of a prompt itself, so that it may be none of the plan's
        outcome = None
        async for output in self.stream(
            f"kvlinker-{secrets.token_hex(8)}",
            behind,
            _ONE_TOKEN,
            max_tokens=1,
            transfer=transfer,
            salt=salt or secrets.token_hex(16),
        ):
            outcome = output.outcome
        return outcome or TransferOutcome(linked=False)

    async def forget_prefixes(self) -> None:
        """Empty vLLM's prefix cache, as soon as no request is under way."""
        while not await self._client.reset_prefix_cache():
            await asyncio.sleep(IDLE_SECONDS)

    def close(self) -> None:
        """Do nothing: the client is stopped by its creator."""


class OwnClient(VLLMClient):
    """A vLLM engine of its own, with an event loop in a thread of its own."""

    def __init__(self, settings: Settings, *, dtype: str) -> None:
        """Start vLLM; takes half a minute or more. Raises InvalidRequestError and ModelLoadError."""
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="kvlinker-vllm", daemon=True)
        self._thread.start()
        try:
            client = asyncio.run_coroutine_threadsafe(_start(settings, dtype), loop).result()
        except BaseException:
            self._stop(loop)
            raise
        super().__init__(client, loop, PlanSigner.of(settings.state_dir))
        self.run(self._warm_up()).result()

    async def _warm_up(self) -> None:
        """Send a first request, so that vLLM compiles what it needs before users wait for it."""
        sampling = SamplingParams(temperature=0, logprobs=1, ignore_eos=True)
        async for _ in self.stream("kvlinker-warm-up", (0, 0), sampling, max_tokens=2):
            pass

    def close(self) -> None:
        if self._thread.is_alive():
            self.run(_end_all_tasks()).result()  # vLLM's own would take its end for a failure
            self._client.shutdown()
            self._stop(self.loop)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()


async def _end_all_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _start(settings: Settings, dtype: str) -> Any:
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvlinker.vllm.adapter import require_linkable, require_tested_version

    options = dict(settings.vllm_options)
    connector = ConnectorOptions.taken_from(options)
    require_tested_version(allow_untested=connector.allow_untested)
    for name in RESERVED_OPTIONS:
        if name in options:
            raise InvalidRequestError(f"vllm_options may not set {name!r}: kvlinker sets it itself.", param=name)
    defaults: dict[str, Any] = {
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_step_tokens,
        "max_num_seqs": settings.max_running,
        "trust_remote_code": settings.trust_remote_code,
        "max_logprobs": MOST_LOGPROBS,
        "disable_log_stats": True,
    }
    if not torch.cuda.is_available():
        defaults["gpu_memory_utilization"] = CPU_MEMORY_SHARE
    if settings.encryption_key is not None:
        os.environ["KVLINKER_ENCRYPTION_KEY"] = settings.encryption_key.get_secret_value()  # never among vLLM's options
    try:
        arguments = AsyncEngineArgs(
            model=settings.model,
            dtype=dtype,
            kv_transfer_config={
                "kv_connector": NAME,
                "kv_role": "kv_both",
                "kv_connector_module_path": "kvlinker.vllm.connector",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": connector.model_dump()
                | {
                    "state_dir": str(settings.state_dir),
                    "host_memory": settings.host_memory,
                    "chunk_scores": settings.chunk_scores,
                },
            },
            **(defaults | options),
        )
    except TypeError as error:
        raise InvalidRequestError(f"vllm_options {json.dumps(options)}: {error}", param="vllm_options") from error
    try:
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        require_linkable(config)
        return AsyncLLM.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)
    except KVLinkerError:
        raise
    except Exception as error:  # vLLM raises whatever it meets, the reason being in its log
        raise ModelLoadError(f"vLLM cannot run {settings.model!r}: {error}") from error


def _new_tokens(output: Any) -> NewTokens:
    (answer,) = output.outputs
    told = (output.kv_transfer_params or {}).get(PARAM)
    logprobs = None
    if answer.logprobs is not None:
        logprobs = [{token: entry.logprob for token, entry in step.items()} for step in answer.logprobs]
    return NewTokens(
        token_ids=tuple(answer.token_ids),
        logprobs=logprobs,
        reason=answer.finish_reason,
        outcome=None if told is None else TransferOutcome.model_validate(told),
    )


def _structured(grammar: AnswerGrammar) -> Any:
    """Return a grammar as vLLM takes it."""
    from vllm.sampling_params import StructuredOutputsParams

    source = json.loads(grammar.source) if grammar.kind == "choice" else grammar.source
    return StructuredOutputsParams(**{grammar.kind: source})


def _vllm_sampling(sampling: SamplingParams, max_tokens: int, transfer: Mapping[str, Any] | None) -> Any:
    """Return vLLM's sampling parameters, without stop strings: kvlinker looks for them itself."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=max(sampling.top_p, 1e-9),
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        bad_words=list(sampling.bad_words),
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        structured_outputs=None if sampling.grammar is None else _structured(sampling.grammar),
        max_tokens=max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if transfer is None else {"kv_transfer_params": transfer},
    )
