"""OpenAI's batch API: files of requests, which run in the background at the lowest priority.

A folder holds all files and batches (`--batch-folder`). Its content is the only state: every router process that sees
the folder can answer for all batches, and one of them at a time runs a batch.
"""
