"""The contract by which the rest of kvlinker uses engines, and the code that both engines share."""
