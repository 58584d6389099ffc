"""Anthropic's Messages API, served as a chat.

Modules: `schema` (the request), `request` (its conversion to a chat request), `answer` (the answer and its events) and
`endpoint`. Import the modules, not this package.
"""
