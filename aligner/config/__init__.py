"""Every setting: one dataclass a group, one default and one docstring a field."""

from aligner.config.recording import record_if_asked

record_if_asked()
