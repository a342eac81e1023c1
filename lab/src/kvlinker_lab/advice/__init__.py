"""Advises on tiers: which of them loads fast enough while a policy recomputes, and the cheapest of
these."""
