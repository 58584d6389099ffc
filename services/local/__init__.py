"""`baton serve`: a supervised cluster on one machine; and the demo."""
