"""The Lightning face of torch-smp: `Trainer(strategy="smp_sharded")`."""
