"""Measures first tokens and decoding of kvlinker and of llama.cpp, alone and disturbed by other
work on the machine."""
