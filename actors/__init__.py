"""The actors: Ray replicas and gRPC shells around the engine."""
