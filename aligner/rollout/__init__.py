"""The rollout engine's contract, the embedded torch engine, and refit."""
