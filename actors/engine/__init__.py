"""The engine: sequences, paged KV, scheduling, verification, drafting. No Ray, no gRPC."""
