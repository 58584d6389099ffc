"""Load generator, micro benchmarks and peers. Never imported by the product, never a timed test."""
