"""What both halves agree on. Depends on the standard library, numpy and msgspec only."""
