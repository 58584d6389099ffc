"""Answers in a form that the request states: what clients ask for becomes one grammar, compiled before any instance.

`asked` and `tags` read requests, `lark` writes grammars, `vocabulary` compiles them.
"""

from services.router.structured.asked import FORM_PARAMETERS, Asked, asked_of
from services.router.structured.lark import Lark, Rule
from services.router.structured.vocabulary import Vocabulary

__all__ = ["FORM_PARAMETERS", "Asked", "Lark", "Rule", "Vocabulary", "asked_of"]
