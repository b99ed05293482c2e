"""The limits of an API key."""

from __future__ import annotations

from mlxpaged.api.access.rate_limit import Allowance


def test_of_two_limits_that_are_reached_the_one_that_takes_longer_is_named() -> None:
    now = [0.0]
    allowance = Allowance(60, 60, lambda: now[0])
    allowance.take("requests", 60)
    allowance.take("tokens", 90)
    assert (allowance.exhausted(), allowance.wait("tokens")) == ("tokens", 31.0)
    now[0] = 31.0
    assert allowance.exhausted() is None


def test_a_key_without_limits_is_never_refused() -> None:
    assert Allowance(None, None, lambda: 0.0).exhausted() is None
