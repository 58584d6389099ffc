"""The offline API: runs a model in this process and is called from Python, without router or network. Names are vLLM's.

Modules: `request_params` and `outputs` (types of input and output), `prompts` (forms of a prompt), `engine_args`
(arguments and the model's folder), `request_runner`, `output_builder` and `beams` (requests and their answers on an
`Engine`), `pooler` (embeddings and scores on a `PoolingEngine`), `requested_adapters`, `llm_engine`, `async_engine` and
`llm` (the public classes). Import the public classes from `baton_serve.engine`.
"""
