"""Trainers: each a page that reads top to bottom."""
