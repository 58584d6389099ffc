"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`, as OpenAI and vLLM have them: the form (`schema`), the
work (`endpoint`, `windows`) and the answers (`formats`).
"""
