"""What becomes what, and where: recipes, source tensors, jobs, shards, machines to serve on."""
