"""The embedded engine: continuous batching over a paged KV cache, any full-attention causal LM of transformers.

`base` holds the contract and imports no torch; everything else here may.
"""
