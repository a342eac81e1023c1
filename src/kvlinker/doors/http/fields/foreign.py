"""The one table of fields that other servers know and this one does not use: taken without a word,
because they mean nothing here; left out, and named by the answer; or refused, because without them
the answer would be wrong.

Bodies check themselves by it (``kvlinker.doors.http.fields.bodies``), and ``docs/api.md`` shows it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Place(StrEnum):
    """Where a field stands: in the body of a route, or in an object inside some."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    EMBEDDINGS = "embeddings"

    MESSAGE = "a message"
    TEXT_PART = "a text part"
    CONTEXT_CACHE_PART = "a `context_cache` part"
    CALL = "a call"
    STREAM_OPTIONS = "`stream_options`"
    STRUCTURED_OUTPUTS = "`structured_outputs`"
    RESPONSES_TOOL = "a tool (responses)"
    MESSAGES_TOOL = "a tool (messages)"
    TOOL_USE = "`tool_use`"
    TOOL_RESULT = "`tool_result`"
    THINKING = "`thinking` blocks"
    DOCUMENT = "`document`"
    CITATIONS = "`citations` of a document"
    MESSAGE_ITEM = "`message` items"
    CALL_ITEM = "`function_call` items"
    RESULT_ITEM = "`function_call_output` items"
    REASONING_ITEM = "`reasoning` items"


ANSWERS = frozenset({Place.CHAT, Place.COMPLETIONS, Place.RESPONSES, Place.MESSAGES})
ROUTES = ANSWERS | {Place.COUNT_TOKENS, Place.TOKENIZE}
_OPENAI = ANSWERS - {Place.MESSAGES}
_TOKENS = frozenset({Place.TOKENIZE, Place.DETOKENIZE})
_TEXT = frozenset({Place.CHAT, Place.COMPLETIONS})
_ANTHROPIC = frozenset({Place.MESSAGES, Place.COUNT_TOKENS})


@dataclass(frozen=True, slots=True)
class ForeignFields:
    """The treatment of fields, and its reason. Null is accepted for all of them."""

    names: tuple[str, ...]
    places: frozenset[Place]
    why: str

    no_ops: tuple[Any, ...] | None = None
    """The values at which fields mean nothing; None for those that mean nothing at any."""

    refused: bool = False
    """True if any other value is refused; else the field is left out, and the answer names it."""

    def is_no_op(self, value: Any) -> bool:
        """Return whether the fields mean nothing at this value."""
        return self.no_ops is None or any(_is_same(value, no_op) for no_op in self.no_ops)


def _taken(names: str, places: frozenset[Place] | Place, why: str) -> ForeignFields:
    return ForeignFields(tuple(names.split()), _as_set(places), why)


def _ignored(names: str, places: frozenset[Place] | Place, why: str, *no_ops: Any) -> ForeignFields:
    return ForeignFields(tuple(names.split()), _as_set(places), why, no_ops)


def _refused(names: str, places: frozenset[Place] | Place, why: str, *no_ops: Any) -> ForeignFields:
    return ForeignFields(tuple(names.split()), _as_set(places), why, no_ops, refused=True)


def _is_same(given: Any, value: Any) -> bool:
    """Return whether both are the same in JSON, where ``false`` is not 0, but 1.0 is 1."""
    return isinstance(given, bool) == isinstance(value, bool) and bool(given == value)


def _as_set(places: frozenset[Place] | Place) -> frozenset[Place]:
    return frozenset({places}) if isinstance(places, Place) else places


_NOTHING_IS_KEPT = "nothing is kept between requests; send the whole conversation"
NO_MEDIA = "this model reads text"
_NO_MORE_TOOLS = "only functions are called, and directly"

FIELDS: tuple[ForeignFields, ...] = (
    _taken(
        "user safety_identifier session_id priority",
        _OPENAI | {Place.EMBEDDINGS},
        "for operators and their statistics: requests are served in order",
    ),
    _taken("metadata", _TEXT, "for operators and their statistics"),
    _taken(
        "prompt_cache_key prompt_cache_retention prompt_cache_options",
        _OPENAI,
        "what began as an earlier prompt did is reused in any case",
    ),
    _taken("store", _TEXT, "only answers of `/v1/responses` are kept"),
    _taken("prediction", Place.CHAT, "a guess at the answer makes it faster at most"),
    _taken("stream_interval", _TEXT, "pieces of streams are sent as they are generated"),
    _taken("length_penalty", _TEXT, "counts for beams alone"),
    _taken("spaces_between_special_tokens", _TEXT, "the tokenizers here add none"),
    _taken("truncation_side", _TEXT, "nothing is truncated"),
    _taken(
        "media_io_kwargs mm_processor_kwargs mm_payload return_mm_kwargs",
        ANSWERS,
        NO_MEDIA,
    ),
    _taken(
        "return_token_offsets routed_experts_prompt_start",
        _TEXT,
        "details that answers here do not have",
    ),
    _taken(
        "reasoning reasoning_effort thinking thinking_token_budget include_reasoning verbosity"
        " chat_template_kwargs",
        Place.COMPLETIONS,
        "completions have no chat template",
    ),
    _taken("max_tool_calls", Place.RESPONSES, "limits built-in tools, of which there are none"),
    _taken(
        "metadata user safety_identifier priority session_id diagnostics",
        Place.MESSAGES,
        "for operators and their statistics",
    ),
    _taken(
        "betas billing_policy fallback_credit_token user_profile_id workspace_id",
        _ANTHROPIC,
        "for Anthropic's own accounts",
    ),
    _taken("media_io_kwargs mm_processor_kwargs mm_payload", _TOKENS, NO_MEDIA),
    _taken("include_obfuscation", Place.STREAM_OPTIONS, "events are not padded"),
    _taken("refusal annotations", Place.MESSAGE, "no chat template shows them"),
    _taken("id index logprobs", Place.TEXT_PART, "come from an earlier answer"),
    _taken("cache_control index", Place.CONTEXT_CACHE_PART, "it is a chunk in any case"),
    _taken("index", Place.CALL, "comes from an earlier answer"),
    _taken(
        "eager_input_streaming", Place.MESSAGES_TOOL, "arguments are sent as they are generated"
    ),
    _taken("cache_control", Place.TOOL_USE, "what began as an earlier prompt did is reused"),
    _taken("signature cache_control", Place.THINKING, "reasoning is sent and shown as it is"),
    _taken("id status phase", Place.MESSAGE_ITEM, "come from an earlier answer"),
    _taken(
        "id status",
        frozenset({Place.CALL_ITEM, Place.RESULT_ITEM}),
        "come from an earlier answer",
    ),
    _taken("id status summary", Place.REASONING_ITEM, "there are no summaries"),
    _ignored("use_beam_search", _TEXT, "answers are sampled token by token", False),
    _ignored("best_of", ANSWERS, "every choice is returned: ask for `n`", 1),
    _refused("suffix", Place.COMPLETIONS, "models here write forward", ""),
    _refused("prompt_embeds", Place.COMPLETIONS, "prompts are text or token ids"),
    _ignored(
        "truncate_prompt_tokens",
        _TEXT,
        "prompts are answered whole; shorten it, so that you know what is left",
    ),
    _ignored("truncate_prompt_tokens", Place.EMBEDDINGS, "texts are embedded whole"),
    _refused("add_special_tokens normalize", Place.EMBEDDINGS, "done in any case", True),
    _ignored("logprob_token_ids", _TEXT, "give `logprobs` or `top_logprobs`", []),
    _ignored("watermarking repetition_detection", ANSWERS, "vLLM's own ways of sampling", False),
    _ignored("return_prompt_text", Place.CHAT, "give `return_token_ids`", False),
    _ignored(
        "vllm_xargs kv_transfer_params ec_transfer_params", ANSWERS, "vLLM's own extensions", {}
    ),
    _refused(
        "chat_template",
        frozenset({Place.CHAT, Place.TOKENIZE}),
        "chunks are placed by the server's own template",
    ),
    _ignored("echo add_special_tokens", Place.CHAT, "the chat template makes the prompt", False),
    _refused("functions", Place.CHAT, "replaced by `tools`", []),
    _refused("function_call", Place.CHAT, "replaced by `tool_choice`", "none", "auto"),
    _refused("function_call", Place.MESSAGE, "replaced by `tool_calls`"),
    _ignored("modalities", Place.CHAT, "answers are text", ["text"]),
    _ignored("audio", frozenset({Place.CHAT, Place.MESSAGE}), NO_MEDIA),
    _ignored("web_search_options", Place.CHAT, "the server searches nothing"),
    _ignored("moderation", frozenset({Place.CHAT, Place.RESPONSES}), "nothing is moderated here"),
    _refused(
        "conversation previous_input_messages",
        Place.RESPONSES,
        "answers are kept; give `previous_response_id`, or send the whole conversation",
    ),
    _ignored("background", Place.RESPONSES, "the request waits for its answer", False),
    _refused("prompt", Place.RESPONSES, "there are no stored prompts; give `input`"),
    _ignored("truncation", Place.RESPONSES, "prompts are answered whole", "disabled"),
    _ignored("context_management", Place.RESPONSES, "prompts are answered whole", []),
    _ignored("image", Place.RESPONSES, NO_MEDIA),
    _ignored("access_programs", Place.RESPONSES, "OpenAI's own"),
    _ignored("enable_response_messages", Place.RESPONSES, "the answer has no such form", False),
    _ignored("context_management", _ANTHROPIC, "prompts are answered whole"),
    _refused("compaction thread", _ANTHROPIC, _NOTHING_IS_KEPT),
    _ignored("mcp_servers", _ANTHROPIC, "only functions are called", []),
    _ignored("speed", _ANTHROPIC, "all requests are served alike", "standard"),
    _ignored("container inference_geo", Place.MESSAGES, "the server runs nothing elsewhere"),
    _ignored("fallbacks", Place.MESSAGES, "one model is served", []),
    _ignored("annotations citations", Place.TEXT_PART, "sources are not cited", []),
    _ignored("encrypted_content", Place.REASONING_ITEM, "send reasoning as `content`", ""),
    _refused("context", Place.DOCUMENT, "write it into the text", ""),
    _ignored("enabled", Place.CITATIONS, "sources are not cited", False),
    _ignored(
        "disable_any_whitespace disable_additional_properties",
        Place.STRUCTURED_OUTPUTS,
        "say it in the schema",
        False,
    ),
    _ignored("disable_fallback", Place.STRUCTURED_OUTPUTS, "there is one backend", True, False),
    _refused(
        "whitespace_pattern structural_tag", Place.STRUCTURED_OUTPUTS, "not kept by the backend"
    ),
    _ignored("allowed_callers", Place.MESSAGES_TOOL, _NO_MORE_TOOLS, ["direct"]),
    _ignored("input_examples", Place.MESSAGES_TOOL, "write them into the `description`", []),
    _ignored(
        "defer_loading",
        frozenset({Place.MESSAGES_TOOL, Place.RESPONSES_TOOL}),
        _NO_MORE_TOOLS,
        False,
    ),
    _ignored(
        "toolset_name", frozenset({Place.TOOL_USE, Place.TOOL_RESULT}), "there are no toolsets"
    ),
    _ignored(
        "caller",
        frozenset({Place.TOOL_USE, Place.CALL_ITEM, Place.RESULT_ITEM}),
        _NO_MORE_TOOLS,
        {"type": "direct"},
    ),
    _ignored("namespace", Place.CALL_ITEM, _NO_MORE_TOOLS),
    _ignored("async async_", Place.CALL_ITEM, _NO_MORE_TOOLS, False),
)

_OF_OTHER_ROUTES = "a field of other routes"

ELSEWHERE: tuple[ForeignFields, ...] = (
    _refused("documents tools functions suffix", ROUTES, _OF_OTHER_ROUTES, [], {}, ""),
    _refused("background", ROUTES, _OF_OTHER_ROUTES, False),
    _refused("response_format", ROUTES, _OF_OTHER_ROUTES, {"type": "text"}),
    *(
        _ignored(names, ROUTES, _OF_OTHER_ROUTES, *no_ops)
        for names, no_ops in (
            (
                "echo logprobs ignore_eos include_stop_str_in_output return_token_ids"
                " return_tokens_as_token_ids continue_final_message use_beam_search stream store"
                " enable_response_messages return_prompt_text return_token_strs",
                (False,),
            ),
            (
                "skip_special_tokens add_generation_prompt parallel_tool_calls include_reasoning",
                (True,),
            ),
            ("n best_of repetition_penalty", (1,)),
            ("min_p min_tokens top_logprobs presence_penalty frequency_penalty", (0,)),
            ("top_k", (0, -1)),
            (
                "stop stop_sequences stop_token_ids bad_words include"
                " mcp_servers logit_bias chat_template_kwargs vllm_xargs kv_transfer_params"
                " ec_transfer_params",
                ([], {}, ""),
            ),
            ("tool_choice function_call", ("none", "auto")),
            ("truncation", ("disabled",)),
            ("modalities", (["text"],)),
        )
    ),
)
"""Fields of OpenAI's, Anthropic's or vLLM's on the routes that have them not, with the values at
which they mean nothing."""

MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "image_embeds": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
}
"""By type of a part that the model does not read, what the text in its place calls it."""


def foreign_fields(place: Place, own: Collection[str]) -> dict[str, ForeignFields]:
    """Return, by name, the fields that a body at ``place`` does not serve, and yet knows; ``own``
    are those that it serves."""
    found = {name: fields for fields in FIELDS if place in fields.places for name in fields.names}
    for fields in ELSEWHERE if place in ROUTES else ():
        for name in fields.names:
            if name not in own:
                found.setdefault(name, fields)
    return found
