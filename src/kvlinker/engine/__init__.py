"""What both engines share, and the contract that the rest of kvlinker knows them by."""
