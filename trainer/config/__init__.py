"""The config of a run: schema, composition by Hydra, validation and help. Imports no torch."""
