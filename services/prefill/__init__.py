"""The process of a prefill instance: computes prompts and hands their KV blocks to decode instances."""
