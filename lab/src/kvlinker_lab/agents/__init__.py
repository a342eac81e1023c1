"""Holds what agents are measured on: workflows whose requests hand answers on."""
