"""The Hugging Face Accelerate face of torch-smp. Nothing is built here yet: it will stand on `smp_core` alone."""
