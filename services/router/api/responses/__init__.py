"""OpenAI's Responses API on the same generation as chats."""
