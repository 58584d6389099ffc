"""The offline API: a model in this process, asked in Python, without router or network. vLLM's names.

Modules: `params` and `outputs` (what goes in and comes out), `prompts` and `text` (text to token ids and back),
`opening` (a folder and its arguments), `writing`, `answers` and `beams` (requests of text on an engine), `vectors` (the
other engine driven to the end), `lora` (which adapter answers), `llm_engine`, `async_engine`, `llm`. Import `LLM`,
`LLMEngine`, `AsyncLLMEngine`, `EngineArgs`, `SamplingParams`, `BeamSearchParams` and `LoRARequest` from `engine`.
"""
