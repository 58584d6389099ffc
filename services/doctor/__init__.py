"""`baton doctor`: what of this machine helps or hinders serving, each finding with a remedy. Changes nothing."""
