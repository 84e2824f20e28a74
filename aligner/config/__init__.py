"""Every setting: one dataclass a group, one default and one docstring a field."""
