"""The contract that the rest of kvlinker knows engines by, and all that both engines share."""
