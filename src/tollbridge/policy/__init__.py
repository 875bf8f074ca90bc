"""Where a request runs: `decide(request, fleet, policy) -> Decision`. Pure: no I/O, no clock, no randomness."""
