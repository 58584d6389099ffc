"""Answers in a form that the request states: what clients ask for becomes one grammar, compiled before any instance.

`asked` and `tags` read requests, `lark` writes grammars, `vocabulary` compiles them.
"""

from baton_serve.services.router.text.grammar.grammar_spec import FORM_PARAMETERS, GrammarSpec, read_grammar_spec
from baton_serve.services.router.text.grammar.lark import Lark, Rule
from baton_serve.services.router.text.grammar.vocabulary import Vocabulary

__all__ = ["FORM_PARAMETERS", "GrammarSpec", "Lark", "Rule", "Vocabulary", "read_grammar_spec"]
