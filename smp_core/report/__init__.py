"""One page about a run, made of the log that its monitor wrote: `smp report`."""
