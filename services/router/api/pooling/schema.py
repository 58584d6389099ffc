"""What clients may send to models that answer with vectors: OpenAI's, Jina's and Cohere's requests, as in vLLM."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton_serve.services.router.protocol.bounds import NonNegative, OrAll, Positive, Priority
from baton_serve.services.router.protocol.openai_requests import Messages, Name
from baton_serve.services.router.protocol.sizes import MAX_INPUTS, MAX_NUMBERS

Texts = str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
TokenIds = Annotated[list[NonNegative], Field(fail_fast=True, min_length=1, max_length=MAX_NUMBERS)]
Input = Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


class PoolingCommon(BaseModel):
    """What all of them have in common. Numbers are numbers and strings are strings: nothing is converted."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: Name | None = None
    truncate_prompt_tokens: OrAll | None = None
    priority: Priority | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    user: Name | None = None


class InputRequest(PoolingCommon):
    """Whatever is read as texts, token ids, or a chat."""

    input: Input | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(InputRequest):
    """`POST /v1/embeddings`: of texts, token ids, or a chat."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    normalize: bool | None = None


class PoolingRequest(EmbeddingRequest):
    """`POST /pooling`. Without `task`: what the model is for."""

    task: Literal["embed", "token_embed", "classify"] | None = None
    activation: bool | None = None


class ClassificationRequest(InputRequest):
    """`POST /classify`."""

    activation: bool | None = None


class ScoreRequest(PoolingCommon):
    """`POST /score`: one to one, one to many, or in pairs."""

    text_1: Texts
    text_2: Texts
    activation: bool | None = None


class Document(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    text: str


class RerankRequest(PoolingCommon):
    """`POST /rerank`. `top_n` 0 means all."""

    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    top_n: NonNegative | None = None
    return_documents: bool | None = None
    activation: bool | None = None
