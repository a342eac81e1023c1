"""Guards requests and answers of all routes: address, connections, hosts and keys, limits, errors,
and the log."""
