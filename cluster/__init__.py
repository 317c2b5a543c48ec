"""The cluster: configuration, gateway, application builder, command line."""
