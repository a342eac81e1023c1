"""Compares vLLM's answers over linked chunks with the embedded engine's, for a small random model;
runs in a process of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.linking import make_plan, parse_policy
from kvlinker.linking.evidence import Evidence
from kvlinker.llm import LLM, ContentPart
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.settings import load_settings
from kvlinker_lab.models.small_models import SMALL, small_model
from kvlinker_lab.models.verdicts import Verdict, failure
from kvlinker_vllm.adapter import require_linkable
from kvlinker_vllm.adapter.configurations import movable_length
from kvlinker_vllm.protocol.signature import PlanSigner
from kvlinker_vllm.protocol.transfer_plan import (
    TransferPlan,
    outcome_of,
    plan_capture,
    plan_transfer,
)

TEXTS = (
    "The harbour of Varna lies below the old town, and its cranes work at night as well. " * 2,
    "Tom Reyes flies to Oslo on Mondays. ",
    "A third text stands between the other two, so that chunks have neighbours to miss. ",
)
"""The chunks, one longer than the model's windows."""

QUESTION = "What is written above, and where was it said first?"
POLICIES = ("naive", "legolink-9", "full")
"""``full`` comes last: the embedded engine would reuse its KV, which is exact, under the others."""

TOKENS = 2
"""The tokens of each answer: the second one also depends on the KV of the first."""

LARGEST_DIFFERENCE = 5e-4
"""The largest difference of a log probability, in nats, where both engines compute the same in
fp32. Some models have logits of several hundred, in which the last bits are as large."""

WIDER_WINDOWS = "cohere2", "cohere2_moe"
"""The classes whose windows are a token wider in vLLM, as their models were trained, than in
transformers; the reference then has them, too."""

NOT_RUN = "vLLM does not run it on a CPU, or not at these sizes"
REASONS = {
    "are not supported for now": "vLLM has no code for its layers",
    "not dispatch through the Transformers attention": "vLLM has no code for its layers",
    "Can't load image processor": "not tried here: vLLM wants its parts for images",
    "Unrecognized configuration class": "not tried here: vLLM wants its parts for images",
}
"""The meaning of phrases in vLLM's errors."""

LONGEST_DETAIL = 300
"""The most characters of an error's text that are kept with a verdict."""

TOKENS_IN_ALL = 512
"""The window of the small models, in tokens, and the tokens of a step."""

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": TOKENS_IN_ALL,
    "max_num_batched_tokens": TOKENS_IN_ALL,
    "max_num_seqs": 16,
    "block_size": 32,
    "num_gpu_blocks_override": 192,
    "disable_log_stats": True,
}

LATENTS: dict[str, Any] = {
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    "block_size": 16,
}
"""Options for models with latents, of whose queries vLLM's own kernel for CPUs rotates one head."""
MISSING: list[str] = []
"""The packages that vLLM's code of this process's model needs, and that are not here."""

Tops = list[dict[int, float]]
"""The most likely tokens of each step of an answer, with their log probabilities."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """A prompt, and what the embedded engine answers to it, by policy."""

    prompt: Prompt
    by_policy: dict[str, Tops]


def _look(look: Callable[[], Any]) -> Any:
    """Look at a model's class for vLLM, which would import all of itself in another process, for
    the sake of GPUs: the class is needed here anyway."""
    try:
        return look()
    except ModuleNotFoundError as error:
        MISSING.append(_package(error))
        raise


def _package(error: ModuleNotFoundError) -> str:
    """Return the package that is missing: transformers names it in the error behind its own."""
    behind = error.__cause__
    if error.name is None and isinstance(behind, ModuleNotFoundError):
        return _package(behind)
    return error.name or str(error)


registry._run_in_subprocess = _look


def verdict_in_vllm(kind: str) -> Verdict:
    """Try a small random model of this class, which the embedded engine links."""
    try:
        with TemporaryDirectory() as folder:
            return _verdict(kind, Path(folder))
    except Exception as error:  # a mistake of ours: the table shows it
        return Verdict(kind, reason=failure(error))


def _verdict(kind: str, folder: Path) -> Verdict:
    model, tokenizer = small_model(kind, wide=True), byte_tokenizer(SMALL["vocab_size"])
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
    options = _options(folder / "model", folder / "state") | (LATENTS if latent else {})
    try:  # before anything is computed
        require_linkable(EngineArgs(**options).create_engine_config())
    except Exception as error:
        return _refusal_verdict(kind, error)
    if kind in WIDER_WINDOWS:
        _widen_windows(model)
    expected = _embedded(model, tokenizer, folder / "embedded")
    try:
        engine = _VLLM(options, PlanSigner.of(folder / "state"))
    except Exception as error:
        return _refusal_verdict(kind, error)
    for chunk in expected.prompt.chunks:
        engine.capture(chunk)
    differences = {
        policy: _difference(engine.answer(expected.prompt, policy), expected.by_policy[policy])
        for policy in POLICIES
    }
    largest = max(differences.values())
    if largest <= LARGEST_DIFFERENCE:
        bounded = movable_length(model.config.get_text_config()) is not None
        return Verdict(kind, error=largest, bounded=bounded)
    if differences["full"] > LARGEST_DIFFERENCE:
        reason = "vLLM computes something else than transformers, linked or not"
        return Verdict(kind, reason=reason, detail=f"{differences['full']:.1e}")
    return Verdict(kind, reason=f"linked, but not exactly ({largest:.1e})")


def _widen_windows(model: Any) -> None:
    for part in (model.config, *model.modules()):
        if getattr(part, "sliding_window", None):
            part.sliding_window += 1


def _refusal_verdict(kind: str, error: Exception) -> Verdict:
    """Return the verdict on a class that vLLM, which raises whatever it meets, does not start
    with."""
    if isinstance(error, UnsupportedModelError):
        return Verdict(kind, reason=error.message)
    if MISSING:
        return Verdict(kind, reason=f"not tried here: vLLM's code for it needs {MISSING[0]}")
    message = " ".join(f"{type(error).__name__}: {error}".split())
    reason = next((reason for words, reason in REASONS.items() if words in message), NOT_RUN)
    return Verdict(kind, reason=reason, detail=message[:LONGEST_DETAIL])


def _options(model: Path, state: Path) -> dict[str, Any]:
    """Return vLLM's options for a model, with kvlinker's connector over a state directory."""
    connector = {
        "kv_connector": "KVLinkerConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"state_dir": str(state)},
    }
    return OPTIONS | {"model": str(model), "kv_transfer_config": connector}


def _embedded(model: Any, tokenizer: Any, state: Path) -> _Answers:
    """Return the prompt of the three texts, and the embedded engine's answers."""
    settings = load_settings(state_dir=state, implicit="off", max_model_len=TOKENS_IN_ALL)
    with LLM.from_model(prepare_model(model, tokenizer), settings) as llm:
        ids = llm.generate_context_cache(list(TEXTS), ttl=3600)
        content: list[ContentPart] = [ids[1], "Read: ", ids[0], ids[2], QUESTION]
        prompt = llm.read_completion(content, policy="naive").prompt
        answers = {
            policy: llm.completion(
                content,
                policy=policy,
                max_tokens=TOKENS,
                temperature=0,
                logprobs=20,
                ignore_eos=True,
            )
            for policy in POLICIES
        }
    return _Answers(
        prompt,
        {
            policy: [{top.token_id: top.logprob for top in step.top} for step in answer.logprobs]
            for policy, answer in answers.items()
        },
    )


class _VLLM:
    """vLLM in this process, with kvlinker's connector."""

    def __init__(self, options: dict[str, Any], signer: PlanSigner) -> None:
        """Raises what vLLM does, and UnsupportedModelError."""
        self._signer = signer
        self._engine = vllm.LLM(**options).llm_engine

    def capture(self, chunk: Chunk) -> None:
        """Compute and store a chunk's KV."""
        begin = len(chunk.prefix)
        plan = plan_capture(_key(chunk), begin=begin, end=begin + len(chunk))
        self._run([*chunk.prefix, *chunk.tokens, 0], plan, 1)

    def answer(self, prompt: Prompt, policy: str) -> Tops:
        """Answer over linked chunks."""
        plan = make_plan(prompt, parse_policy(policy), Evidence())
        keys = [_key(placement.chunk) for placement in plan.placements]
        output = self._run(prompt.tokens.tolist(), plan_transfer(plan, keys), TOKENS)
        return [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs]

    def _run(self, tokens: Sequence[int], plan: TransferPlan, most: int) -> Any:
        """Return vLLM's answer to a linked request. Raises RuntimeError where it was not linked."""
        sampling = vllm.SamplingParams(
            temperature=0,
            max_tokens=most,
            logprobs=20,
            ignore_eos=True,
            extra_args={"kv_transfer_params": self._signer.params(plan, tokens)},
        )
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": secrets.token_hex(8)}
        self._engine.add_request(secrets.token_hex(8), prompt, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    outcome = outcome_of(output.kv_transfer_params)
                    if outcome is None or not outcome.linked:
                        raise RuntimeError("vLLM computed a request in full that was to be linked")
                    return output.outputs[0]
        raise RuntimeError("vLLM did not answer")


def _difference(ours: Tops, expected: Tops) -> float:
    """Return the largest difference of a log probability, up to where answers part."""
    largest = 0.0
    for found, wanted in zip(ours, expected, strict=True):
        both = found.keys() & wanted.keys()
        if not both:
            return float("inf")
        largest = max(largest, *(abs(found[token] - wanted[token]) for token in both))
        if max(found, key=found.__getitem__) != max(wanted, key=wanted.__getitem__):
            break
    return largest


def _key(chunk: Chunk) -> str:
    return chunk_key(chunk, fingerprint="small", tenant="default")
