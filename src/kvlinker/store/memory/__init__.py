"""Memory that chunks lie in, and how they get from the host's to a device's."""
