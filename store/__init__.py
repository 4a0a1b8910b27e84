"""What is kept: keys, the ledger, the seal."""
