"""Messages between processes: versioned `msgspec` structs and the SSE framing. No I/O."""
