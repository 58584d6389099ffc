"""The messages of the HTTP API as values: requests, responses, errors, and the little HTTP that endpoints need."""
