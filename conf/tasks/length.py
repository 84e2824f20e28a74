"""A reward that needs no answers: responses of about 100 characters. Take it as the pattern of your own reward.function."""

WANTED = 100


def about_100_characters(response: str, sample: dict) -> dict:
    """1 at 100 characters, falling linearly to 0 at none and at 200. `characters` is only recorded."""
    characters = len(response.strip())
    return {"reward": max(0.0, 1.0 - abs(characters - WANTED) / WANTED), "characters": characters}
