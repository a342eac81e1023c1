"""Compares a share of live answers with the full computation, keeps the figures, and steers the
default policy by them.

The auditor draws requests and compares; figures are kept by policy, tenant and kind.
``kvlinker.llm`` hands it every request, and the server reports its findings.
"""
