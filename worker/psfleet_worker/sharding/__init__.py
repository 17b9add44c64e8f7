"""Routing of a call's parts to servers, and of their replies back."""
