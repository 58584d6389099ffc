"""The process that does all of a request alone."""
