"""A cluster in virtual time: the router's own code with simulated instances, which only know how long work takes."""
