"""Reads files of documents as texts."""

from kvlinker.prompting.documents.texts import (
    FORMATS,
    DocumentText,
    MissingLibraryError,
    NoTextError,
    read_document,
)

__all__ = ["FORMATS", "DocumentText", "MissingLibraryError", "NoTextError", "read_document"]
