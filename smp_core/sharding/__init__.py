"""Where parameters, gradients and optimizer states live: FSDP2 units on the partition group; what joins replicas."""
