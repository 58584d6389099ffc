"""The offline API: a model in this process, asked in Python, without router or network. vLLM's names.

Modules: `params` and `outputs` (what goes in and comes out), `prompts` and `text` (text to token ids and back),
`writing` and `vectors` (the two engines driven to the end), `lora` (which adapter answers), `llm`. Import `LLM`,
`SamplingParams` and `LoRARequest` from `engine`.
"""
