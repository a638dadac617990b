"""Prediction against published measurement, group by group, failures included. Nothing is fitted on rows it
tests.
"""
