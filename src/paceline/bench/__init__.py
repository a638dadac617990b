"""Workloads, paired runs and their reports."""
