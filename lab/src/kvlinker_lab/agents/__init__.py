"""Workflows whose requests hand answers on, which agents are measured on."""
