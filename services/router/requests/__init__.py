"""Runs one request from admission to its end: dispatch, attempts, replays, and the record of what happened."""
