"""Reading of generated text one character at a time, so that it does not matter in what pieces it came."""
