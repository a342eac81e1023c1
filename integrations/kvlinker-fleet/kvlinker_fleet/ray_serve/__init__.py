"""A fleet on Ray Serve: it places replicas and ingresses, watches, replaces and scales them.
Requests do not pass through it, but over HTTP from an ingress to a replica."""
