"""Pure decisions about where and when a request runs: no I/O, and the caller passes `now` in."""
