"""From logits to tokens: sampling, penalties, masks and grammars."""
