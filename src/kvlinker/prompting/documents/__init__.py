"""Reads files of documents as texts."""

from kvlinker.prompting.documents.conversion import FORMATS, MissingLibraryError
from kvlinker.prompting.documents.texts import DocumentText, NoTextError, read_document

__all__ = ["FORMATS", "DocumentText", "MissingLibraryError", "NoTextError", "read_document"]
