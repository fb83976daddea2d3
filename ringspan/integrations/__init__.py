"""Ringspan as an attention of other trainers; each module imports its trainer.

ringspan.integrations.olmo_core      OLMo-core 3.0
ringspan.integrations.torchtitan     torchtitan 0.3
"""
