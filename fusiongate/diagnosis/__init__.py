"""Which rounding or operand explains a difference: a reference recorded as a trace of ops, and replayed."""
