"""`GET /`: a page to look at. One file without a build step; it reads /health and /recent and asks for chats."""
