"""Data parallelism in simulated time: whole models on workers, whose weights and gradients travel as a plan says."""
