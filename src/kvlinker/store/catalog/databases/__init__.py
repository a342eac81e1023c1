"""The databases that a catalog may be in, behind one interface."""
