"""Unmodified client libraries against a running server. Each script sends requests, checks the answers and exits with
status 0.
"""
