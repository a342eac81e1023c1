"""Loading chunks from slower tiers, layer by layer, ahead of the computation."""
