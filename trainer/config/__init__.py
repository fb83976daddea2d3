"""The config schema, its composition by Hydra, validation and help. Imports no torch."""
