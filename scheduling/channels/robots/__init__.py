"""The group robots of WeCom, DingTalk and Feishu."""
