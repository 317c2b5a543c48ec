"""The three contracts and the code generated from them (``make protos``)."""
