"""What all request bodies share: strict types, no unknown fields, and how OpenAI's other fields are met."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from kvlinker.errors import InvalidRequestError


def _unicode(text: str) -> str:
    """JSON's escapes can spell half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("text_unicode", "Input should be valid Unicode, without lone surrogates") from error
    return text


Text = Annotated[str, AfterValidator(_unicode)]

Name = Annotated[Text, StringConstraints(min_length=1, max_length=256)]

MAX_PAIRS = 16

Metadata = Annotated[
    dict[Annotated[Text, StringConstraints(max_length=64)], Annotated[Text, StringConstraints(max_length=512)]],
    Field(max_length=MAX_PAIRS),
]
"""Up to 16 pairs; keys of up to 64 and values of up to 512 characters."""


class Body(BaseModel):
    """Base of all bodies.

    The tags of unions stand in angle brackets, so that the path of an error can be told from them
    (see ``kvlinker.server.errors``).
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI's that do not change the answer here."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI's that would change the answer, with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _meet_foreign_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.refused.items():
            if data.get(name) is not None and data[name] not in harmless:
                raise InvalidRequestError(
                    f"{name!r} is not supported. Leave it out.", param=name, code="unsupported_parameter"
                )
        foreign = cls.ignored | cls.refused.keys()
        return {name: value for name, value in data.items() if name not in foreign}
