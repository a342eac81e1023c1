"""The memory of chunks, and copies from the host's to a device's."""
