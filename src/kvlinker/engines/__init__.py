"""The two engines that compute linked prompts, and the contract that both fulfil."""
