"""Structured output: converts the form that a request wants for its answer into one grammar and checks it.

`grammar_spec` and `structural_tags` read requests, `lark` writes grammars, and `compiling` compiles them in another
process. An invalid grammar is thus rejected before the request reaches an instance.
"""

from baton_serve.contracts.lark import Lark, Rule
from baton_serve.services.router.text.grammar.grammar_spec import FORM_PARAMETERS, GrammarSpec, read_grammar_spec
from baton_serve.services.router.text.grammar.vocabulary import Vocabulary

__all__ = ["FORM_PARAMETERS", "GrammarSpec", "Lark", "Rule", "Vocabulary", "read_grammar_spec"]
