"""Pure maths on tensors: no groups, no ranks."""
