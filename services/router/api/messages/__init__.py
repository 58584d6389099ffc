"""Anthropic's Messages API, served as a chat.

Modules: `schema` (the request), `request_to_chat` (its conversion), `answer_schema` (the answer and its events) and
`endpoint`. Import the modules, not this package.
"""
