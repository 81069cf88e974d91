"""Grammars for the new text of ``generate(..., grammar=...)``.

Importing this package imports neither torch nor xgrammar.
"""

from triforce_tree.grammar.values import EBNF, Choice, Grammar, JSONObject, JSONSchema, Regex

__all__ = ["EBNF", "Choice", "Grammar", "JSONObject", "JSONSchema", "Regex"]
