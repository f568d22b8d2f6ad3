"""What the parts of the reader ask of each other: each part of a syntax tree may hold each other one."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from typing import Final

from paceline.doctor.reading.knowledge import Api
from paceline.doctor.reading.machine import Flow, Machine
from paceline.doctor.reading.trace import Loop
from paceline.doctor.reading.values import Value

__all__ = ["MAX_UNROLLED", "Walker"]

MAX_UNROLLED: Final = 4
"""So many constants that a loop goes over are told apart: its whole body is walked for each."""


class Walker(Machine, ABC):
    """Walks a syntax tree. Which file tells how, stands beside each question."""

    @abstractmethod
    def execute(self, body: list[ast.stmt]) -> Flow:
        """Statements, one after the other; how they end (`statements`)."""

    @abstractmethod
    def evaluate(self, node: ast.expr) -> Value:
        """What an expression gives (`expressions`, `operators`)."""

    @abstractmethod
    def assign(self, target: ast.expr, value: Value) -> None:
        """Gives a name, an attribute, an element or several of them a value (`assignments`)."""

    @abstractmethod
    def changed_in_place(self, value: Value, made: Value, node: ast.AST) -> None:
        """``x /= n``, ``x.div_(n)``: the object itself is now what was made of it (`operators`)."""

    # --- objects

    @abstractmethod
    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        """``value.name`` (`objects`)."""

    @abstractmethod
    def item(self, value: Value, key: Value, node: ast.AST) -> Value:
        """``value[key]`` (`objects`)."""

    @abstractmethod
    def elements(self, value: Value, loop: Loop, node: ast.AST, most: int = MAX_UNROLLED) -> list[Value]:
        """What a loop's variable is, in one iteration that stands for all; in each, for a few constants, at most so
        many (`objects`)."""

    @abstractmethod
    def element(self, value: Value, node: ast.AST) -> Value:
        """Any one of its elements (`objects`)."""

    @abstractmethod
    def text_of(self, value: Value, node: ast.AST) -> Value:
        """What stands for it in a text: a class of the script may say so, and do a lot for it (`objects`)."""

    # --- calls

    @abstractmethod
    def call(self, function: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.AST) -> Value:
        """``function(...)`` (`calls`)."""

    @abstractmethod
    def call_method(
        self, receiver: Value, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.AST
    ) -> Value:
        """``receiver.name(...)`` (`calls`)."""

    @abstractmethod
    def known_method(
        self,
        receiver: Value,
        name: str,
        known: Api,
        arguments: list[Value],
        keywords: dict[str, Value],
        node: ast.AST,
    ) -> Value:
        """A method of which the tables know something (`calls`)."""

    @abstractmethod
    def run_lazily(self, value: Value, node: ast.AST) -> Value:
        """What a generator of the script gives (`calls`)."""
