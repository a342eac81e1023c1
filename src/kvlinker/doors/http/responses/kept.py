"""Keeps answers with their inputs for the requests that go on from them, and reads both back. All
functions ask the catalog: call them in a thread."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from kvlinker.base.errors import InvalidRequestError, KVLinkerError, ResponseNotFoundError
from kvlinker.base.types.responses import KeptResponse
from kvlinker.doors.http.fields.bodies import LeftOut
from kvlinker.doors.http.models import ServedModel
from kvlinker.doors.http.responses.items import Item, ItemReference, MessageItem
from kvlinker.doors.http.responses.objects import ResponseObject
from kvlinker.doors.http.responses.requests import ResponsesRequest

logger = logging.getLogger(__name__)

_ABSENT = "does not exist, has expired or was deleted, or its request had `store: false`"

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
"""The prefixes of items' ids, by type."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request's conversation, with kept items in place of all that the request refers to."""

    earlier: Sequence[Item]
    """The items up to the response that the request goes on from."""

    items: Sequence[Item]
    """The items of the request's own input, one for each entry."""

    referred: Mapping[str, str]
    """The JSON of the kept items that the input refers to, by id."""


def read_conversation(served: ServedModel, body: ResponsesRequest, tenant: str) -> Conversation:
    """Return a request's conversation. Raises InvalidRequestError and ResponseNotFoundError for
    what the tenant has not."""
    log, now = served.llm.catalog.responses, time.time()
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        turns = log.conversation(body.previous_response_id, tenant, now)
        if turns is None:
            raise InvalidRequestError(
                f"Previous response with id {body.previous_response_id!r} not found: it, or one"
                f" that it goes on from, {_ABSENT}. Send the whole conversation as 'input'.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        for turn in turns:
            earlier += [*json.loads(turn.input), *map(json.loads, turn.output)]
    own = body.own_items()
    ids = [item.id for item in own if isinstance(item, ItemReference)]
    referred = log.items(ids, tenant, now) if ids else {}
    items: list[Item] = []
    for index, item in enumerate(own):
        if not isinstance(item, ItemReference):
            items.append(item)
        elif item.id in referred:
            items += _ITEMS.validate_json(f"[{referred[item.id]}]")
        else:
            raise ResponseNotFoundError(
                f"Item with id {item.id!r} not found: it {_ABSENT}. Send the item itself, as"
                " clients do with `store: false`.",
                param=f"input.{index}.id",
                code="item_not_found",
            )
    return Conversation(_ITEMS.validate_python(earlier), items, referred)


def keep(
    served: ServedModel,
    body: ResponsesRequest,
    conversation: Conversation,
    whole: ResponseObject,
    tenant: str,
) -> bool:
    """Keep a whole answer; returns whether it is kept. The answer is there, so that a catalog that
    fails is no error of the request."""
    response = KeptResponse(
        whole.id,
        whole.model_dump_json(exclude_unset=True, exclude={"output"}),
        json.dumps(
            [
                json.loads(conversation.referred[item.id])
                if isinstance(item, ItemReference)
                else _as_kept(item)
                for item in body.own_items()
                if not isinstance(item, LeftOut)
            ]
        ),
        {item.id: item.model_dump_json(exclude_unset=True) for item in whole.output},
    )
    try:
        served.llm.catalog.responses.add(
            response,
            tenant,
            now=time.time(),
            ttl=served.settings.response_ttl,
            previous=body.previous_response_id,
            used=list(conversation.referred),
        )
    except KVLinkerError as error:
        logger.warning("An answer was not kept for requests to go on from: %s", error.message)
        return False
    return True


def read_response(served: ServedModel, response_id: str, tenant: str) -> dict[str, Any]:
    """Return a kept response as it was answered. Raises ResponseNotFoundError."""
    kept = served.llm.catalog.responses.get(response_id, tenant, time.time())
    if kept is None:
        raise _not_found(response_id)
    response: dict[str, Any] = json.loads(kept.body)
    return response | {"output": list(map(json.loads, kept.output.values()))}


def read_input(served: ServedModel, response_id: str, tenant: str) -> list[dict[str, Any]]:
    """Return all items that a kept response answers, the first one first. Raises
    ResponseNotFoundError."""
    turns = served.llm.catalog.responses.conversation(response_id, tenant, time.time())
    if turns is None:
        raise _not_found(response_id)
    items = []
    for turn in turns[:-1]:
        items += [*json.loads(turn.input), *map(json.loads, turn.output)]
    return [*items, *json.loads(turns[-1].input)]


def delete_response(served: ServedModel, response_id: str, tenant: str) -> None:
    """Delete a kept response. Raises ResponseNotFoundError."""
    if not served.llm.catalog.responses.delete(response_id, tenant, time.time()):
        raise _not_found(response_id)


def _not_found(response_id: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"Response with id {response_id!r} not found: it {_ABSENT}.", param="response_id"
    )


def _as_kept(item: Any) -> dict[str, Any]:
    """Return an item of input with an id, and as the list of parts that OpenAI lists."""
    kept: dict[str, Any] = item.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        kept["content"] = [{"type": kind, "text": item.content}]
    return {"type": item.type, "id": f"{_PREFIXES[item.type]}_{secrets.token_hex(12)}", **kept}
