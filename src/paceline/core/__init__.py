"""The words both wings speak. Imports nothing of ours but `paceline.errors`, and no torch."""
