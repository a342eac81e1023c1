"""The figures of the three papers, measured anew: one module each, and a page that shows the claims beside them."""
