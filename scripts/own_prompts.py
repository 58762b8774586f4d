"""The project's own prompts, for benches, demos and tests: 60 in its own words, chat, code, reasoning and the rest."""

from pathlib import Path

OWN_PROMPTS = Path(__file__).parent / "assets" / "prompts.jsonl"
