"""A parsed text in which everything that costs work passes through a filter that counts it (`scheduling.thrift`)."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

LEAST_ROUND = 10  #: what a round of a loop costs, if it contains little
#: Filters that no text can name.
ROUND, JOINED, MADE, SEARCHED = "(round)", "(joined)", "(made)", "(searched)"


class Counted(NodeTransformer):
    """Lets each round of a loop and each call of a macro pay for itself, and what “~” joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count(node)
        if node.test is not None:
            node.test = nodes.And(_round_of(node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._count(node)

    def _count(self, node: Any) -> nodes.Node:
        counted = nodes.ExprStmt(_round_of(node), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, counted)
        return node  # type: ignore[no-any-return]

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._weigh(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._weigh(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._weigh(node) if node.ctx == "load" else node

    def _weigh(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, MADE, [], [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _search(node.expr)
        for operand in node.ops:
            operand.expr = _search(operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        node.node = _search(node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        pieces = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(pieces, JOINED, [], [], None, None, lineno=node.lineno)


def _search(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, SEARCHED, [], [], None, None, lineno=node.lineno)


def _round_of(node: nodes.Node) -> nodes.Filter:
    cost = nodes.Const(max(LEAST_ROUND, sum(1 for _ in node.find_all(nodes.Node))), lineno=node.lineno)
    return nodes.Filter(cost, ROUND, [], [], None, None, lineno=node.lineno)
