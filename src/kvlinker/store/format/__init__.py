"""Chunk files: their layout, checksums, codecs, compression and encryption."""
