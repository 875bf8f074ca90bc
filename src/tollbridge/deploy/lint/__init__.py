"""A judge of manifests, ours and hand-written ones: schemas as the API server applies them, then what it lets pass."""
