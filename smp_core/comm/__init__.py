"""What travels between ranks: collectives as FSDP2 communication objects, and the meter that counts their bytes."""
