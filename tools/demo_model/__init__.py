"""Training of the bundled demo model: its corpus, tokenizer, training loop and evaluation.

Entry point: `python -m tools.train_demo_model --out FOLDER`. The product never imports this package.
"""
