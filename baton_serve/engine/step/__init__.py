"""One engine step: setup, planning, launching, and what happens between the layers."""
