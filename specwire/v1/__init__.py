"""Generated protocol code. Never edited; `make proto` writes it from protos/specwire/v1."""
