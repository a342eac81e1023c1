"""Wraps vLLM's asynchronous engine for the rest of the frontend: token ids in, new tokens out."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import ModelLoadError, UnsupportedModelError
from kvlinker.base.types.answers import PromptLogprobs, Usage
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.settings import Settings
from kvlinker_vllm.frontend.grammars import VLLMGrammars
from kvlinker_vllm.options import REFUSAL_FILE
from kvlinker_vllm.plugin import FAILURE_FILE
from kvlinker_vllm.protocol.signature import PlanSigner
from kvlinker_vllm.protocol.transfer_plan import TransferOutcome, TransferPlan, outcome_of
from kvlinker_vllm.protocol.worker_memory import KNOWN, KnownMemory

T = TypeVar("T")

logger = logging.getLogger("kvlinker.vllm.frontend.client")

SPARE_TOKENS = 2
"""The tokens of vLLM's window that capturing leaves free: one after the captured ones, and an
answer of one token."""

STORE_THREADS = 4
"""The threads for calls that wait for the store, or take long for long prompts."""

IDLE_SECONDS = 0.01
"""The seconds between two looks at whether vLLM has nothing to do."""

_ONE_TOKEN = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens that vLLM generated since the last report."""

    token_ids: tuple[int, ...]

    logprobs: Sequence[Mapping[int, float]] | None
    """One entry per token, {token id: log probability}; None if none were asked for."""

    reason: str | None
    """The reason why these are the last tokens: ``stop``, ``length``, ``abort`` or ``error``; None
    if more follow."""

    outcome: TransferOutcome | None
    """The outcome of the request's transfer plan, with the last tokens; None if it had none."""


class VLLMClient:
    """One of vLLM's engine clients and its event loop. Methods may be called from any thread."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop, signer: PlanSigner) -> None:
        """Wrap ``client``. ``signer`` is the signer of the state directory that vLLM's connector
        was given."""
        self.engine_client = client
        """vLLM's own client, to be used in ``loop``."""

        self.loop = loop
        self._signer = signer
        self.memory = KnownMemory()
        self.grammars = VLLMGrammars(client)
        self.threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="kvlinker-store")

    @property
    def healthy(self) -> bool:
        """True while vLLM's engine serves."""
        return not self.engine_client.errored

    @property
    def slots(self) -> int:
        """The number of tokens that fit into vLLM's KV cache."""
        cache = self.engine_client.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    @property
    def max_model_len(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return int(self.engine_client.vllm_config.model_config.max_model_len)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` in the client's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run ``work`` in a thread, so that the loop serves other requests meanwhile."""
        return await self.loop.run_in_executor(self.threads, partial(work, *arguments))

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
        """Yield the outputs of the request ``name`` as they are generated. Closing the iterator
        aborts the request."""
        prompt = {"prompt_token_ids": list(tokens)} | ({} if salt is None else {"cache_salt": salt})
        transfer_params = None if transfer is None else self.sign(transfer, tokens)
        structured = None if sampling.grammar is None else self.grammars.prepare(sampling.grammar)
        params = _vllm_sampling(sampling, max_tokens, transfer_params, structured)
        generated = self.engine_client.generate(
            prompt, params, name, reasoning_ended=True
        )  # grammars have reasoning in them
        async with aclosing(generated) as outputs:  # closing aborts what is under way
            async for output in outputs:
                new = _new_tokens(output)
                self.note(new.outcome)
                yield new

    async def prompt_logprobs(
        self, tokens: NDArray[np.int64], *, first: int, top: int
    ) -> PromptLogprobs:
        """Compute ``tokens`` [length], linking and reusing nothing, and return the log
        probabilities of those from ``first`` on, which is not 0, and of the ``top`` most likely in
        the place of each."""
        name = f"kvlinker-{secrets.token_hex(8)}"
        params = _vllm_sampling(replace(_ONE_TOKEN, prompt_logprobs=top), 1, None, None)
        prompt = {"prompt_token_ids": tokens.tolist(), "cache_salt": secrets.token_hex(16)}
        scored: list[Mapping[int, Any]] = []
        async with aclosing(self.engine_client.generate(prompt, params, name)) as outputs:
            async for output in outputs:
                scored += output.prompt_logprobs or ()
        own, best = [], []
        for token, entries in zip(tokens[first:].tolist(), scored[first:], strict=True):
            logprobs = {other: entry.logprob for other, entry in entries.items()}
            own.append(logprobs[token])
            best.append(sorted(logprobs.items(), key=lambda entry: -entry[1])[:top])
        return PromptLogprobs(
            token_ids=tokens[first:],
            logprobs=np.array(own, dtype=np.float32),
            top_ids=np.array([[token for token, _ in row] for row in best], dtype=np.int64),
            top_logprobs=np.array(
                [[logprob for _, logprob in row] for row in best], dtype=np.float32
            ),
            usage=Usage(0, 0, len(tokens)),
        )

    async def run_transfer(
        self, transfer: TransferPlan, tokens: Sequence[int], *, salt: str | None = None
    ) -> TransferOutcome:
        """Carry out a transfer plan over ``tokens`` [linked] and return its outcome. The answer is
        discarded. No other request reuses its KV, unless it is given this ``salt``."""
        behind = (
            *tokens,
            0,
        )  # vLLM computes the last token of a prompt itself, so that it may be none of the plan's
        return await self.run_prompt(behind, transfer, salt or secrets.token_hex(16))

    async def run_prompt(
        self, tokens: Sequence[int], transfer: TransferPlan, salt: str
    ) -> TransferOutcome:
        """Generate a token after a prompt, discard it, and return the outcome of the prompt's
        transfer plan. Later requests with this ``salt`` find the prompt's KV."""
        name = f"kvlinker-{secrets.token_hex(8)}"
        outcome = None
        async for output in self.stream(
            name, tokens, _ONE_TOKEN, max_tokens=1, transfer=transfer, salt=salt
        ):
            outcome = output.outcome
        return outcome or TransferOutcome(linked=False)

    async def forget_prefixes(self) -> None:
        """Empty vLLM's prefix cache, as soon as no request is under way."""
        while not await self.engine_client.reset_prefix_cache():
            await asyncio.sleep(IDLE_SECONDS)

    def sign(self, transfer: TransferPlan, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` that carry a transfer plan for a prompt of these
        tokens."""
        return self._signer.params(transfer, tokens) | {KNOWN: self.memory.change_numbers()}

    def note(self, outcome: TransferOutcome | None) -> None:
        """Note the report on workers' memory in a transfer's outcome."""
        if outcome is not None and outcome.memory is not None:
            self.memory.note(outcome.memory)

    def close(self) -> None:
        """End the threads; vLLM's client is stopped by its creator. Idempotent."""
        self.threads.shutdown()


class OwnClient(VLLMClient):
    """A vLLM engine of its own, with an event loop in a thread of its own."""

    def __init__(self, settings: Settings, vllm_config: Any) -> None:
        """Start vLLM as ``configure`` has it; takes half a minute or more. Raises ModelLoadError,
        and UnsupportedModelError for a model that cannot be linked."""
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="kvlinker-vllm", daemon=True)
        self._thread.start()
        try:
            client = asyncio.run_coroutine_threadsafe(_start(settings, vllm_config), loop).result()
        except BaseException:
            self._stop(loop)
            raise
        super().__init__(client, loop, PlanSigner.of(settings.state_dir))
        began = time.monotonic()
        try:
            self.run(self._warm_up()).result()
        except Exception as error:  # vLLM raises whatever it meets
            self.close()
            raise ModelLoadError(
                f"vLLM does not answer with {settings.model!r}: {' '.join(str(error).split())}"
            ) from error
        logger.info("vLLM has answered its first request (%.1f s).", time.monotonic() - began)

    async def _warm_up(self) -> None:
        """Send a first request, so that vLLM compiles its kernels before users wait for them."""
        may_have_logprobs = self.engine_client.vllm_config.model_config.max_logprobs != 0
        sampling = SamplingParams(
            temperature=0, logprobs=1 if may_have_logprobs else None, ignore_eos=True
        )
        async for _ in self.stream("kvlinker-warm-up", (0, 0), sampling, max_tokens=2):
            pass

    def close(self) -> None:
        if self._thread.is_alive():
            self.run(_end_all_tasks()).result()  # vLLM's own would take its end for a failure
            self.engine_client.shutdown()
            self._stop(self.loop)
        super().close()

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()


async def _end_all_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _start(settings: Settings, vllm_config: Any) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    if settings.encryption_key is not None:
        os.environ["KVLINKER_ENCRYPTION_KEY"] = (
            settings.encryption_key.get_secret_value()
        )  # never among vLLM's options
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # which vLLM would send to its authors
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        refusal = Path(folder) / "refusal"
        vllm_config.kv_transfer_config.kv_connector_extra_config[REFUSAL_FILE] = str(refusal)
        failure = Path(folder) / "failure"
        os.environ[FAILURE_FILE] = str(failure)
        try:
            client = AsyncLLM.from_vllm_config(
                vllm_config,
                disable_log_stats=settings.vllm_options.get("disable_log_stats", False),
                enable_log_requests=settings.vllm_options.get("enable_log_requests", False),
            )
        except Exception as error:  # vLLM raises whatever it meets, the reason being in its log
            if refusal.exists():
                raise UnsupportedModelError(refusal.read_text()) from error
            reason = failure.read_text() if failure.exists() else " ".join(str(error).split())
            raise ModelLoadError(f"vLLM cannot run {settings.model!r}: {reason}") from error
        finally:
            del os.environ[FAILURE_FILE]
    logger.info("vLLM's engine is up (%.1f s).", time.monotonic() - began)
    return client


def _new_tokens(output: Any) -> NewTokens:
    (answer,) = output.outputs
    logprobs = None
    if answer.logprobs is not None:
        logprobs = [
            {token: entry.logprob for token, entry in step.items()} for step in answer.logprobs
        ]
    return NewTokens(
        token_ids=tuple(answer.token_ids),
        logprobs=logprobs,
        reason=answer.finish_reason,
        outcome=outcome_of(output.kv_transfer_params),
    )


def _vllm_sampling(
    sampling: SamplingParams,
    max_tokens: int,
    transfer: Mapping[str, Any] | None,
    structured: Mapping[str, Any] | None,
) -> Any:
    """Return vLLM's sampling parameters, without stop strings, and, where calls may come, without
    stop tokens: kvlinker looks for them itself.

    ``structured`` are the fields of vLLM's for the request's grammar, which alone decides where its
    answer ends.
    """
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=max(sampling.top_p, 1e-9),
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        ignore_eos=sampling.ignore_eos and structured is None,
        min_tokens=sampling.min_tokens if structured is None else 0,
        stop_token_ids=[] if sampling.call_marks else list(sampling.stop_token_ids),
        bad_words=list(sampling.bad_words),
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=None
        if sampling.allowed_token_ids is None
        else list(sampling.allowed_token_ids),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        structured_outputs=None if structured is None else StructuredOutputsParams(**structured),
        max_tokens=max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if transfer is None else {"kv_transfer_params": transfer},
    )
