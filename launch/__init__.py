"""How people start things: ranks on this machine, jobs under SLURM, and a doctor for the machine itself.

Here belongs what runs before a rank exists. It starts trainer and is imported by nothing.
"""
