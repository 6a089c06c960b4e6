"""Channels to one person through a vendor's API: tokens, answers with codes, quotas."""
