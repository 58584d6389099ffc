"""Define the fields of pooling requests (OpenAI, Jina, Cohere, TEI, vLLM), and how they name truncation."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton_serve.services.router.protocol.openai_requests import (
    ContentPart,
    Messages,
    Name,
    ProcessorSettings,
    TruncationSide,
)
from baton_serve.services.router.protocol.request_bounds import (
    MAX_INPUTS,
    MAX_NUMBERS,
    NonNegative,
    OrAll,
    Positive,
    Priority,
)


class ScoredParts(BaseModel):
    """A text with images that is scored or ranked, as the parts of a chat message."""

    model_config = ConfigDict(strict=True)

    content: Annotated[list[ContentPart], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_fields(cls, given: object) -> object:
        # With `extra="forbid"`, pydantic would make an error of each of them.
        if isinstance(given, dict) and given.keys() - cls.model_fields.keys():
            raise ValueError("it has other fields than content")
        return given


class Document(BaseModel):
    """A document of a /rerank request that is an object instead of a text. Cohere's clients send further fields with
    it, which are ignored.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str


Scored = str | ScoredParts
Documents = Annotated[list[Scored | Document], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
Scoreds = Scored | Annotated[list[Scored], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
TokenIds = Annotated[list[NonNegative], Field(fail_fast=True, min_length=1, max_length=MAX_NUMBERS)]
Texts = str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
Input = Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


class PoolingCommon(BaseModel):
    """The fields that the requests of all pooling endpoints have in common."""

    # Strict: a number in a string is an error. Converting it could hide a mistake of the client.
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: Name | None = None
    truncate_prompt_tokens: OrAll | None = None
    truncation_side: TruncationSide | None = None
    priority: Priority | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    user: Name | None = None

    def kept_tokens(self) -> int | None:
        """Return the number of tokens to which longer inputs are cut; -1 stands for the model's context, None for no
        cut.
        """
        return self.truncate_prompt_tokens

    def keeps_end(self) -> bool:
        """Return True if truncation keeps the last tokens of an input, False if it keeps the first ones."""
        return self.truncation_side == "left"


class InputRequest(PoolingCommon):
    """A pooling request whose input is texts, token ids, or a chat (`messages`)."""

    input: Input | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorSettings | None = None


class EmbeddingRequest(InputRequest):
    """The body of `POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    normalize: bool | None = None


class PoolingRequest(EmbeddingRequest):
    """The body of `POST /pooling`. Without `task` the first task that the model has is used."""

    task: Literal["embed", "token_embed", "classify"] | None = None
    activation: bool | None = None


class ClassificationRequest(InputRequest):
    """The body of `POST /classify`."""

    activation: bool | None = None


class ScoreRequest(PoolingCommon):
    """The body of `POST /score`: compares one text with one, one with many, or the texts of two equally long lists
    pairwise. Of a single `ScoredParts`, each part is a text or image to compare, as in vLLM.
    """

    text_1: Scoreds
    text_2: Scoreds
    activation: bool | None = None
    mm_processor_kwargs: ProcessorSettings | None = None


class RerankRequest(PoolingCommon):
    """The body of `POST /rerank`: with `documents` that of Jina, Cohere and vLLM, with `texts` that of Hugging Face's
    Text Embeddings Inference (TEI). A `top_n` of 0 returns all documents.
    """

    query: Scored
    documents: Documents | None = None
    top_n: NonNegative | None = None
    return_documents: bool | None = None
    activation: bool | None = None
    mm_processor_kwargs: ProcessorSettings | None = None
    texts: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)] | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None

    def kept_tokens(self) -> int | None:
        """Return the number of tokens to which pairs of query and document are cut, None for no cut. TEI's `truncate`
        is -1, which cuts to the model's context.
        """
        return -1 if self.truncate else self.truncate_prompt_tokens

    def keeps_end(self) -> bool:
        """Return True if truncation keeps the last tokens, False for the first ones. TEI names the side
        `truncation_direction`.
        """
        side = self.truncation_side or self.truncation_direction or "right"
        return side.lower() == "left"
