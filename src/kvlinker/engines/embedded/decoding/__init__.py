"""Turns what the last layer gives into log probabilities and next tokens, within a grammar where
there is one."""
