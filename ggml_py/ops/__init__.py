"""The op table: every operation is declared here once. Graphs check operands by it; backends, passes, tests and reports look
operations up in it.

table     what is declared of an op
primitive the ops that docs/numerics.md defines
compose   the ops that are made of them: each a template
"""
