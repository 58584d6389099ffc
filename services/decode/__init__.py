"""The process of a decode instance: fetches the KV blocks of prompts and generates the answers."""
