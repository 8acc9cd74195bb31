"""Values for sharded parameters: drawn, broadcast, loaded or cast, a part for each rank."""
