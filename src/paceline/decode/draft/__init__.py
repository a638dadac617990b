"""Drafters, one file each, behind the contract in base.py."""
