"""/v1/responses: OpenAI's newer API, translated to the one request for conversations and back.
Answers are kept for a while."""
