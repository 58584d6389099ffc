"""Images in chats: which parts of messages they are (`parts`), the tokens that take their place (`places`), and their
files, from wherever a request says they are (`files`, `web`, `limits`). Imports Pillow only for a request that has one.
"""
