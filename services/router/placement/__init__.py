"""Decisions about where and when a request runs. Pure code: `now` is passed in."""
