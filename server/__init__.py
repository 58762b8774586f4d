"""The cloud half: one EAGLE drafter that proposes token trees for many targets."""
