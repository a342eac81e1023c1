"""Has the chunks of requests loaded or computed, and kept in variants."""
