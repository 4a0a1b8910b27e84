"""What the tests stand on: clients, scripted engines, tiny models."""
