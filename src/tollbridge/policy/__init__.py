"""Decision = decide(request, fleet view, ...): pure rules. No I/O, no clock, no randomness."""
