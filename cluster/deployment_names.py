"""Names of the application's deployments, as Ray Serve shows them."""

GATEWAY, TARGET, DRAFT = "gateway", "target", "draft"
