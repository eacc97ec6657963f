"""How an exercise is judged: a checker runs the learner's answer on fresh random cases and returns a Verdict in words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass


class Wrong(Exception):
    """Raised by a checker, with what is wrong, as specific as it can be told."""


@dataclass(frozen=True)
class Verdict:
    """passed: True, False, or None when the exercise was not attempted yet."""

    passed: bool | None
    message: str

    def __repr__(self) -> str:
        return {True: "✓ ", False: "✗ ", None: "… "}[self.passed] + self.message


def checker(judge: Callable[..., str]) -> Callable[..., Verdict]:
    """Turn `judge(answer, ...)`, which raises Wrong or returns what it checked, into a checker that returns a Verdict.

    An answer that raises NotImplementedError or gives nothing back (see `given`) counts as not attempted; any other
    exception is the learner's, and the verdict names it.
    """

    @functools.wraps(judge)
    def check(*answers, **options) -> Verdict:
        try:
            return Verdict(True, judge(*answers, **options))
        except NotImplementedError:
            return Verdict(None, "not attempted yet")
        except Wrong as wrong:
            return Verdict(False, str(wrong))
        except Exception as error:
            return Verdict(False, f"raised {type(error).__name__}: {error}")

    return check


def given(value):
    """The answer's value; an answer that returned None was not attempted."""
    if value is None:
        raise NotImplementedError
    return value
