"""How the bundled demo model is made: its corpus, tokenizer, training loop and evaluation.

Entry point: `python -m tools.train_demo_model --out FOLDER`. Nothing in the product imports this package.
"""
