"""What several benches read from their command lines."""

from __future__ import annotations

from starsd.edge.policy import Policy
from starsd.shared.errors import UsageError


def counts(name: str, text: str) -> tuple[int, ...]:
    """Positive integers by commas."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UsageError(f"{name} is {text!r}, expected positive integers by commas, such as 1,4,16")
    return counts


def policy_named(name: str) -> Policy:
    try:
        return Policy(name)
    except ValueError:
        raise UsageError(f"policy is {name!r}, expected {', '.join(policy.value for policy in Policy)}") from None
