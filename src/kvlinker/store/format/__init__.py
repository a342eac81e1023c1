"""Writes and reads chunk files: their layout, checksums, codecs, compression and encryption."""
