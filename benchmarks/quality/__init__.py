"""Decision quality: the same traffic under every policy, judged by what users feel."""
