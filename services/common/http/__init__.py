"""The HTTP/1.1 server of every process."""
