"""API keys, rate limits and the audit log."""
