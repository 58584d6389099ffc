"""Holds the page that `GET /` serves: one HTML file without a build step, which shows the cluster and offers a chat.

The page reads /health and /recent and posts to /v1/chat/completions.
"""
