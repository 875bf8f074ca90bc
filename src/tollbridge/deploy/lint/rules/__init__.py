"""What a schema does not say. Each module yields findings from a case; none reads a file."""
