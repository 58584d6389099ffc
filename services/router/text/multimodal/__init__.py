"""Loads the images of chat requests (`image_files`, `url_fetch`) and puts their tokens into prompts (`image_tokens`).

Pillow and httpx are imported only when a request has an image.
"""
