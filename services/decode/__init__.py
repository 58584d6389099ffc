"""The process that fetches a prompt's blocks and writes the answer."""
