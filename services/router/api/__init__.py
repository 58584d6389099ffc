"""The endpoints that generate text or compute vectors: one file or folder for each family of the API.

`model_service` is what they share, with `model_view` and `generation_starter` as its parts. `generation` produces the
text deltas of an answer; `answer_writer` (OpenAI) and `content_block_writer` (Messages, Responses) send them.
"""
