"""OpenAI's Responses API, served as a chat. Its modules are named as those of `api.messages`."""
