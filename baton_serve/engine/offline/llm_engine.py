"""`LLMEngine`: requests that come and go while others are written. Its owner steps it, from one thread."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from baton_serve.contracts.identity import RequestId
from baton_serve.engine.engine import Engine
from baton_serve.engine.errors import ConfigError, EngineError
from baton_serve.engine.offline.engine_args import EngineArgs, OpenedModel, open_model
from baton_serve.engine.offline.lora import LoRARequest, RequestedAdapters
from baton_serve.engine.offline.outputs import RequestOutput
from baton_serve.engine.offline.params import SamplingParams
from baton_serve.engine.offline.prompts import ParsedPrompt, Prompt, parse_prompts
from baton_serve.engine.offline.request_runner import PreparedPrompt, RequestRunner, StepChanges


class LLMEngine:
    """`engine = LLMEngine.from_engine_args(EngineArgs("/models/llama"))`."""

    def __init__(self, model: OpenedModel) -> None:
        """Loads it. Raises `engine.errors`."""
        config = model.config
        if model.kind != "generate":
            raise ConfigError("this model answers with vectors: use LLM and its embed, classify, score or encode")
        self.tokenizer = model.tokenizer
        self._defaults = model.defaults
        self._enable_lora = config.enable_lora
        self._engine = Engine(config)
        self._writer = RequestRunner(self._engine, self.tokenizer, seed=config.seed)
        most = config.max_adapters - len(config.lora_modules)
        self._adapters = RequestedAdapters(self._engine.adapters, most=most)
        self._outputs: list[RequestOutput] = []
        self._failures: list[EngineError] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        return cls(open_model(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Raises `RequestError`, `ConfigError` or `AdapterError`, and nothing is left of it then."""
        given = parse_prompts(prompt)
        if len(given) != 1:
            raise ConfigError("add_request takes one prompt")
        self.add(request_id, given[0], params or self.default_params(), lora_request=lora_request, priority=priority)

    def add(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> None:
        """As `add_request`."""
        fingerprint = self.load_adapters([lora_request])[0]
        ids = prompt.token_ids
        if ids is None:
            ids = self.tokenizer(prompt.text, add_special_tokens=add_special_tokens)["input_ids"]
        keep = params.truncate_prompt_tokens
        kept = ids if keep is None else ids[-keep:]
        self._writer.add(
            RequestId(request_id), PreparedPrompt(prompt.text, kept, params, priority, lora_request, fingerprint)
        )

    def load_adapters(self, asked: Sequence[LoRARequest | None]) -> list[str]:
        """Their fingerprints: room is made for all of them. Raises `ConfigError` or `AdapterError`."""
        if any(asked) and not self._enable_lora:
            raise ConfigError("lora_request needs enable_lora=True")
        return self._adapters.fingerprints(asked)

    def step(self) -> list[RequestOutput]:
        """Requests that have something new, each with all that it has written so far. Raises `EngineError` for one that
        failed; the others go on with the next step."""
        stepped = self.advance()
        self._outputs += [self.look(request_id) for request_id in stepped.changed]
        self.abort_request(stepped.ended)
        self._failures += stepped.failed.values()
        if self._failures:
            raise self._failures.pop(0)
        outputs, self._outputs = self._outputs, []
        return outputs

    def advance(self) -> StepChanges:
        """One step, for a caller that takes what has ended with `take`."""
        return self._writer.step() if self._writer.has_requests else StepChanges()

    def look(self, request_id: str) -> RequestOutput:
        """What it has written so far."""
        return self._writer.output(RequestId(request_id))

    def take(self, request_id: str) -> RequestOutput:
        """What it has written; it is forgotten then."""
        output = self.look(request_id)
        self.abort_request(request_id)
        return output

    def abort_request(self, request_id: str | Sequence[str]) -> None:
        """Those that have ended, or never were, are left alone."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._writer.forget(RequestId(one))

    def has_unfinished_requests(self) -> bool:
        return self._writer.has_requests or bool(self._outputs or self._failures)

    def get_tokenizer(self) -> Any:
        """Of transformers."""
        return self.tokenizer

    def default_params(self) -> SamplingParams:
        """vLLM's defaults, with what the model's generation_config.json says instead."""
        return self._defaults.params()

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
