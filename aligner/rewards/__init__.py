"""Scores of responses: verifiers and reward models."""
