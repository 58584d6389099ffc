"""The router process: the OpenAI API, tokenisation, placement, and streams that outlive instances. No tensors."""
