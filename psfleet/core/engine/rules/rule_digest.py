"""Digest of a rule's source, to notice that processes have different versions of a user's rule.

A table's rule is sent as a name, and each process has the source itself. If a rule is edited between a
snapshot and the job that restores it, or if a worker has an older file than a server, the digests differ and
the table is refused (finding_rules.py). A digest covers the rule's functions and everything that they name,
but not comments, docstrings and layout.
"""

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from textwrap import dedent
from types import FunctionType
from typing import Any

from psfleet.core.base.errors import RuleError
from psfleet.core.engine.rules.named_definition import NamedDefinition


def is_own(rule: type[NamedDefinition]) -> bool:
    """Return whether a rule comes with psfleet rather than from a user's module."""
    return rule.__module__.startswith("psfleet.core.engine.rules.")


def definition_of(rule: type[NamedDefinition]) -> str:
    """Return the rule's `version`, or else a digest of its source. Empty for psfleet's own rules.

    The digest covers the class, and the functions, classes and plain constants of its package that the class
    names, directly or indirectly. It does not cover comments, docstrings and layout. psfleet's own rules need
    no digest: tests compare them with recorded trajectories, so they compute the same in every version.

    Raises:
        RuleError: The source cannot be read.
    """
    if rule.version or is_own(rule):
        return rule.version
    key: Any = rule  # for mypy, a class is not hashable
    return _digest(key)


@cache
def _digest(rule: Any) -> str:
    # Follow names from the class to the functions and classes that it uses, and so on, but only within the
    # rule's own package. Texts are sorted, so that the order in which they were found does not matter.
    home = rule.__module__.partition(".")[0]
    pending: list[Any] = [rule]
    items: set[Any] = {rule}
    texts: set[str] = set()
    while pending:
        item = pending.pop()
        tree = _tree(rule, item)
        texts.add(ast.unparse(tree))
        for name, value in _named(tree, vars(sys.modules[item.__module__])):
            if isinstance(value, type | FunctionType):
                if value.__module__.partition(".")[0] == home and value not in items:
                    items.add(value)
                    pending.append(value)
            elif isinstance(value, bool | int | float | str | tuple):
                texts.add(f"{name} = {value!r}")
    return hashlib.blake2b("\n".join(sorted(texts)).encode(), digest_size=6).hexdigest()


def _tree(rule: type[NamedDefinition], item: Any) -> ast.AST:
    """Parse the source of a class or function of a rule, and drop docstrings.

    Raises:
        RuleError: The source cannot be read.
    """
    try:
        tree = ast.parse(dedent(inspect.getsource(item)))
    except (OSError, TypeError, SyntaxError) as error:
        raise RuleError(
            f"the source of {item.__qualname__}, which {rule.word} {rule.name!r} uses, cannot be read "
            f"({error}); define it in a module that is a file"
        ) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _named(tree: ast.AST, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the global names that the syntax uses, with their values."""
    for name in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
        if name in names:
            yield name, names[name]
