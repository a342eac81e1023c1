"""/v1/messages: Anthropic's API, translated to the one request for conversations and back."""
