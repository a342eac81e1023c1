"""Compute the results that linking must agree with, by a model as it is in transformers."""
