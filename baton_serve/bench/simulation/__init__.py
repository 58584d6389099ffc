"""A cluster in virtual time: the router's own code over instances that only know how long work takes."""
