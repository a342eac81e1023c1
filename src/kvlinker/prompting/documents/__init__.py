"""Reads files of documents as texts."""

from kvlinker.prompting.documents.converters import CONVERTERS
from kvlinker.prompting.documents.texts import DocumentText, NoTextError, read_document

__all__ = ["CONVERTERS", "DocumentText", "NoTextError", "read_document"]
