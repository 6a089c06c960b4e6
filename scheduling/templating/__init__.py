"""Compile and render message templates."""
